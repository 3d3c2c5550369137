"""Steps per second and goodput of a job, as one of its ranks sees them. This module does no I/O.

As in the lighthouse's report, goodput is the share of time in committed steps. The time between two commits is one step
if nothing happened in between. If a step was discarded or the quorum changed, an unknown part of the time was a wait,
so the step counts with at most the mean time of the undisturbed steps before it. Time begins with the first commit,
because the first step compiles and waits for groups that are still starting.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Commit(NamedTuple):
    """A committed step. `ended` is the number of steps that this rank has committed or discarded so far."""

    step: int
    ended: int
    quorum_id: int
    at: float

    def rate_since(self, earlier: "Commit") -> float | None:
        """Return the steps per second since an earlier commit, or None if no time has passed."""
        seconds = self.at - earlier.at
        return max(0, self.step - earlier.step) / seconds if seconds > 0 else None


@dataclass(slots=True)
class StepRates:
    """Number and duration of the steps that a rank has committed after its commit `first`."""

    first: Commit
    last: Commit
    undisturbed: int = 0
    undisturbed_s: float = 0.0
    committed_s: float = 0.0

    def add(self, commit: Commit) -> None:
        """Add the next commit, which must have a higher step number."""
        last, self.last = self.last, commit
        took_s = commit.at - last.at
        if commit.quorum_id == last.quorum_id and commit.ended == last.ended + 1:
            self.undisturbed += 1
            self.undisturbed_s += took_s
            self.committed_s += took_s
        elif self.undisturbed:
            self.committed_s += min(took_s, self.undisturbed_s / self.undisturbed)

    @property
    def goodput(self) -> float | None:
        seconds = self.last.at - self.first.at
        return self.committed_s / seconds if seconds > 0 else None
