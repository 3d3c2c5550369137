"""The time that ranks spent in each phase, read at scrape time on the daemon's own loop."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class PhaseCollector(Collector):
    """`seconds` is called once a scrape: by job, each phase's own time over all ranks that ever were."""

    def __init__(self, seconds: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "lighthouse_rank_phase_seconds",
            "Time of all ranks in each phase that scripts name; step: outside of any phase",
            labels=["job", "phase"],
        )
        for job, phases in self._seconds().items():
            for phase, seconds in sorted(phases.items()):
                family.add_metric([job, phase], seconds)
        yield family
