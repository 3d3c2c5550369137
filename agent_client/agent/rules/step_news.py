"""What others have cost a step, in one line each: a group that was lost, groups that healed. No I/O; handed the time.

The line about a loss comes with the commit of the step that it has discarded, and says how long that took. Where that
takes longer than LOSS_HELD_S, or fails, the loss is told before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse_protocol.rules.span import span

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
