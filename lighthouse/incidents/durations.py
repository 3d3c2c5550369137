"""How many incidents each job has had, and how long they took to notice and to recover from."""

from collections import Counter

from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_runtime.metrics.histogram import Histogram

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
MAX_JOBS = 1000

Key = tuple[str, IncidentKind]


class IncidentTimes:
    """For one event loop: nothing is locked."""

    def __init__(self) -> None:
        self.opened: Counter[Key] = Counter()
        self.detect: dict[Key, Histogram] = {}
        self.recover: dict[Key, Histogram] = {}

    def began(self, job: str, kind: IncidentKind) -> None:
        """An incident is new."""
        key = job, kind
        if key not in self.opened and len(self.opened) >= MAX_JOBS * len(IncidentKind):
            del self.opened[next(iter(self.opened))]
        self.opened[key] += 1

    def detected(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """From the fault until it was noticed."""
        _add(self.detect, (job, kind), seconds)

    def recovered(self, job: str, kind: IncidentKind, seconds: float) -> None:
        """From the fault until a step was committed after it."""
        _add(self.recover, (job, kind), seconds)


def _add(times: dict[Key, Histogram], key: Key, seconds: float) -> None:
    if key not in times and len(times) >= MAX_JOBS * len(IncidentKind):
        del times[next(iter(times))]
    times.setdefault(key, Histogram(BOUNDS_S)).add(seconds)
