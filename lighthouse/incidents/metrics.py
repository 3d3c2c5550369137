"""How many incidents there were, how soon they were detected, and how soon training recovered."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.incidents.durations import BOUNDS_S, IncidentTimes, Key
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_runtime.metrics.histogram import Histogram


class IncidentCollector(Collector):
    """`jobs`: those that are shown though they have had no incident; with zeros, so that a first incident is a rise."""

    def __init__(self, times: IncidentTimes, jobs: Callable[[], Iterable[str]] = tuple) -> None:
        self._times = times
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        times, keys = self._times, [(job, kind) for job in self._jobs() for kind in IncidentKind]
        opened = CounterMetricFamily("lighthouse_incidents", "Incidents, by kind", labels=["job", "kind"])
        for job, kind in dict.fromkeys([*keys, *times.opened]):
            opened.add_metric([job, kind.value], times.opened.get((job, kind), 0))
        yield opened
        yield _family(
            "lighthouse_incident_detection_seconds", "From a fault until the lighthouse detects it", times.detect, keys
        )
        yield _family(
            "lighthouse_incident_recovery_seconds",
            "From a fault until the first step that is committed after it",
            times.recover,
            keys,
        )


def _family(name: str, text: str, times: Mapping[Key, Histogram], keys: Collection[Key]) -> Metric:
    family, none = HistogramMetricFamily(name, text, labels=["job", "kind"]), Histogram(BOUNDS_S)
    for job, kind in dict.fromkeys([*keys, *times]):
        histogram = times.get((job, kind), none)
        family.add_metric([job, kind.value], histogram.buckets(), histogram.total)
    return family
