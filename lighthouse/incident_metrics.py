"""What a scrape shows of incidents: how soon they were noticed, and how soon training went on."""

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.histogram import Histogram
from lighthouse_protocol.messages.incident import IncidentKind

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
MAX_JOBS = 1000

_Key = tuple[str, IncidentKind]


class IncidentTimes:
    """For one event loop: nothing is locked."""

    def __init__(self) -> None:
        self._detect: dict[_Key, Histogram] = {}
        self._recover: dict[_Key, Histogram] = {}

    def detected(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """From the fault until it was noticed."""
        _add(self._detect, (job, kind), seconds)

    def recovered(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """From the fault until a step was committed after it."""
        _add(self._recover, (job, kind), seconds)

    def collect(self) -> Iterator[Metric]:
        yield _family("lighthouse_detect_seconds", "From a fault until the lighthouse noticed it", self._detect)
        yield _family(
            "lighthouse_recover_seconds", "From a fault until the first step committed after it", self._recover
        )


class IncidentCollector(Collector):
    def __init__(self, times: IncidentTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        return self._times.collect()


def _add(times: dict[_Key, Histogram], key: _Key, seconds: float) -> None:
    if key not in times and len(times) >= MAX_JOBS * len(IncidentKind):
        del times[next(iter(times))]
    times.setdefault(key, Histogram(BOUNDS_S)).add(seconds)


def _family(name: str, text: str, times: dict[_Key, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["job", "kind"])
    for (job, kind), histogram in times.items():
        family.add_metric([job, kind.value], histogram.buckets(), histogram.total)
    return family
