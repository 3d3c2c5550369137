"""Who leads, in Prometheus' form."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse.etcd.rules.candidate import CandidateStatus, Role


class LeadershipCollector(Collector):
    """None: this lighthouse has its store alone, and leads."""

    def __init__(self, status: Callable[[], CandidateStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        leads = status is None or status.role is Role.LEADING
        yield GaugeMetricFamily("lighthouse_leader", "1 if this lighthouse leads, 0 if it follows", float(leads))
        yield GaugeMetricFamily(
            "lighthouse_store_available",
            "0 while the shared store does not answer this lighthouse",
            float(status is None or not status.store_error),
        )
        yield GaugeMetricFamily(
            "lighthouse_leader_term",
            "The term that this lighthouse led last, 0 if none",
            float(status.term if status else 0),
        )
