"""How soon incidents were detected, and how soon training recovered."""

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.incidents.durations import IncidentTimes, Key
from lighthouse_runtime.metrics.histogram import Histogram


class IncidentCollector(Collector):
    def __init__(self, times: IncidentTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        times = self._times
        yield _family(
            "lighthouse_incident_detection_seconds", "From a fault until the lighthouse detects it", times.detect
        )
        yield _family(
            "lighthouse_incident_recovery_seconds",
            "From a fault until the first step that is committed after it",
            times.recover,
        )


def _family(name: str, text: str, times: dict[Key, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["job", "kind"])
    for (job, kind), histogram in times.items():
        family.add_metric([job, kind.value], histogram.buckets(), histogram.total)
    return family
