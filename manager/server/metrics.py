"""The manager's numbers, read at scrape time from the one snapshot."""

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse_protocol.messages.session import HoldState
from lighthouse_protocol.messages.status import ManagerStatus

_GAUGES: dict[str, tuple[str, Callable[[ManagerStatus], float]]] = {
    "uptime_seconds": ("Since the manager started.", lambda s: s.uptime_s),
    "lighthouse_reachable": ("1 while the lighthouse answers.", lambda s: float(s.lighthouse_reachable)),
    "quorum_id": ("The quorum last answered.", lambda s: float(s.quorum_id)),
    "step": ("The step last asked for.", lambda s: float(s.step)),
    "ranks_waiting": ("Ranks that wait for a quorum.", lambda s: float(len(s.ranks_waiting))),
}
_COUNTERS: dict[str, tuple[str, Callable[[ManagerStatus], float]]] = {
    "commits": ("Steps committed.", lambda s: float(s.commits)),
    "discards": ("Steps discarded.", lambda s: float(s.discards)),
    "grants": ("Steps that the ranks began without asking the lighthouse.", lambda s: float(s.grants)),
}
_MODES = (*(mode.value for mode in HoldState), "none")


class _Snapshot(Collector):
    def __init__(self, status: ManagerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(f"lighthouse_manager_{name}", text, value=read(self._status))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(f"lighthouse_manager_{name}", text, value=read(self._status))
        modes = GaugeMetricFamily(
            "lighthouse_manager_mode", "1 for how the quorum is held, 0 for the others.", labels=["mode"]
        )
        for mode in _MODES:
            modes.add_metric([mode], self._status.mode == mode)
        yield modes


def render(status: ManagerStatus) -> tuple[bytes, str]:
    """(body, content type) of the text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(status))
    return generate_latest(registry), CONTENT_TYPE_LATEST
