"""Log lines about steps that other groups have delayed, and rules for a rank whose quorum requests are refused.

This module does no I/O. `StepNews` builds one line for a lost group or for groups that healed. A loss is logged after
the discarded step has been repeated and committed, so that the line contains the delay. If the repetition fails or
takes longer than LOSS_HELD_S, the loss is logged without the delay.
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
    name: str
    why: str
    step: int
    at: float

    def __str__(self) -> str:
        return f"lost {self.name} ({self.why})"


class StepNews:
    """Builds one rank's log lines about lost and healed groups. Times come from the caller's monotonic clock."""

    def __init__(self) -> None:
        self._loss: Loss | None = None
        self._healing: tuple[str, int, float] | None = None

    def lost(self, loss: Loss) -> str:
        """Record the loss of a group, which discards the step. Return the pending line about an earlier loss, or ""."""
        pending = self.flush()
        self._loss = loss
        return pending

    def pop_overdue(self, now: float) -> str:
        """Return the pending line if it has been pending for at least LOSS_HELD_S, or else an empty string."""
        return self.flush() if self._loss is not None and now >= self._loss.at + LOSS_HELD_S else ""

    def flush(self) -> str:
        """Record that the current step was discarded. Return the log line about it, or "" if no loss caused it."""
        loss, self._loss, self._healing = self._loss, None, None
        return "" if loss is None else f"step {loss.step} discarded: {loss}"

    def heal_begins(self, step: int, healing: Sequence[str], now: float) -> str:
        names = ", ".join(healing)
        self._healing = names, step, now
        return f"step {step} waits for {names} to heal"

    def describe_commit(self, step: int, participants: Sequence[str], now: float) -> list[str]:
        (loss, self._loss), (healing, self._healing) = (self._loss, None), (self._healing, None)
        lines = list[str]()
        if loss is not None:
            without = "" if loss.name in participants else " without it"
            lines.append(f"{loss}; step {step} redone{without} after {span(now - loss.at)}")
        if healing is not None and healing[1] == step:
            lines.append(f"{healing[0]} healed; step {step} took {span(now - healing[2])}")
        return lines


FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
FIRST_LOG_AFTER = 3  # consecutive requests
LOG_INTERVAL_S = 60.0

_FINAL = (InvalidRequest, NotServed, Unrecoverable)
_WAITS = (DeadlinePassed, Unreachable, Superseded, LimitReached)


class RetryPolicy:
    """Decides whether a rank retries after its request for a quorum has been refused.

    1. If no later request can succeed, the rank exits immediately.
    2. If a later request may succeed (another process with the same name is still alive, or a quorum was revoked
       before its first step), the rank exits after `limit` consecutive refusals of this kind.
    3. A rank that is waiting for more groups, for the lighthouse or for a restarting manager never exits. The wait
       and its reason are logged regularly.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tries = self._refusals = 0
        self._began_at = self._logged_at = 0.0
        self.backoff_s = 0.0

    def reset(self) -> None:
        self._tries = self._refusals = 0

    def record_refusal(self, error: LighthouseError, now: float) -> str:
        """Record a refusal. Return the reason why this rank must exit, or an empty string if it should retry."""
        if self._tries == 0:
            self._began_at = self._logged_at = now
        self.backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._tries, 10))
        self._tries += 1
        if isinstance(error, _FINAL):
            return str(error)
        self._refusals = 0 if isinstance(error, _WAITS) else self._refusals + 1
        if self._refusals < self._limit:
            return ""
        return f"{self._refusals} requests for a quorum refused in a row (max_consecutive_discards): {error}"

    def pop_log_line(self, error: LighthouseError, now: float) -> str:
        """Return the line to log about the last refusal, `error`, or an empty string if no line is due at `now`."""
        is_first = self._tries == FIRST_LOG_AFTER
        if self._tries < FIRST_LOG_AFTER or not (is_first or now >= self._logged_at + LOG_INTERVAL_S):
            return ""
        self._logged_at = now
        return f"no quorum since {now - self._began_at:.0f} s, after {self._tries} requests; asking on: {error}"
