"""What others have cost a step, in one line each: a group that was lost, groups that healed. No I/O; handed the time.

The line about a loss comes with the commit of the step that it has discarded, and says how long that took. Where that
takes longer than LOSS_HELD_S, or fails, the loss is told before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotServed,
    Superseded,
    Unreachable,
    Unrecoverable,
)
from lighthouse_protocol.rules.stall import span

LOSS_HELD_S = 2.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Of the group `name`, noticed at `at` in `step`; `why`: as it was told."""

    name: str
    why: str
    step: int
    at: float

    def __str__(self) -> str:
        return f"lost {self.name} ({self.why})"


class StepNews:
    """Of one rank. Time is the caller's monotonic clock."""

    def __init__(self) -> None:
        self._loss: Loss | None = None
        self._healing: tuple[str, int, float] | None = None

    def lost(self, loss: Loss) -> str:
        """A step was discarded by it. The line about an earlier one that is still due; empty: none is."""
        before, self._loss, self._healing = self._loss, loss, None
        return "" if before is None else f"step {before.step} discarded: {before}"

    def late(self, now: float) -> str:
        """The line that cannot wait for the step any more; empty: none."""
        return self.flush() if self._loss is not None and now >= self._loss.at + LOSS_HELD_S else ""

    def flush(self) -> str:
        """The step under way is not committed. The line that is due; empty: none."""
        loss, self._loss, self._healing = self._loss, None, None
        return "" if loss is None else f"step {loss.step} discarded: {loss}"

    def waits(self, step: int, healing: Sequence[str], now: float) -> str:
        """The step waits for these groups, which heal."""
        names = ", ".join(healing)
        self._healing = names, step, now
        return f"step {step} waits for {names} to heal"

    def committed(self, step: int, participants: Sequence[str], now: float) -> list[str]:
        """The lines that come with the commit of `step`."""
        (loss, self._loss), (healing, self._healing) = (self._loss, None), (self._healing, None)
        lines = list[str]()
        if loss is not None:
            without = "" if loss.name in participants else " without it"
            lines.append(f"{loss}; step {step} redone{without} after {span(now - loss.at)}")
        if healing is not None and healing[1] == step:
            lines.append(f"{healing[0]} healed; step {step} took {span(now - healing[2])}")
        return lines


# -- patience -----------------------------------------------------------------
#
# What a rank does after requests for a quorum that were not granted. No I/O.
#
# 1. A refusal that no further request can change ends the rank at once.
# 2. A refusal that may pass (another process of that name still lives, a quorum was revoked before it began) ends the
#    rank after `limit` in a row.
# 3. Waiting is legitimate: for further groups, for a lighthouse, for a manager that starts again. It never ends a
#    rank, and is logged regularly, with its reason.

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
SAID_FROM = 3  # requests in a row
SAID_EVERY_S = 60.0

_FINAL = (InvalidRequest, NotServed, Unrecoverable)
_WAITS = (DeadlinePassed, Unreachable, Superseded, LimitReached)


class Patience:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tries = self._refusals = 0
        self._began_at = self._said_at = 0.0
        self.backoff_s = 0.0
        """How long to wait before the next request."""

    def answered(self) -> None:
        """A request was granted."""
        self._tries = self._refusals = 0

    def refused(self, error: LighthouseError, now: float) -> str:
        """Why this rank must end; empty: it asks again."""
        if self._tries == 0:
            self._began_at = self._said_at = now
        self.backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._tries, 10))
        self._tries += 1
        if isinstance(error, _FINAL):
            return str(error)
        self._refusals = 0 if isinstance(error, _WAITS) else self._refusals + 1
        if self._refusals < self._limit:
            return ""
        return f"{self._refusals} requests for a quorum refused in a row (max_consecutive_discards): {error}"

    def take_news(self, error: LighthouseError, now: float) -> str:
        """What to log as an error now; empty: nothing."""
        is_first = self._tries == SAID_FROM
        if self._tries < SAID_FROM or not (is_first or now >= self._said_at + SAID_EVERY_S):
            return ""
        self._said_at = now
        return f"no quorum since {now - self._began_at:.0f} s, after {self._tries} requests; asking on: {error}"
