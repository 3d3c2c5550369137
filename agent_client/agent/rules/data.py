"""What a rank draws its batches from, and whether the committed steps use each sample once. Rules only, no I/O."""

from dataclasses import dataclass
from typing import NamedTuple

from agent_client.agent.rules.agreement import Announced, Kind


class DataChoice(NamedTuple):
    """The same in all groups, or they train on each other's samples."""

    length: int
    """Number of samples in the data set."""
    batch_size: int
    accumulate: int
    """Number of batches in a microbatch."""
    seed: int
    """Of the order."""

    def __str__(self) -> str:
        accumulated = f" x {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.length} samples, in batches of {self.batch_size}{accumulated}, in the order of seed {self.seed}"


def announce_draw(choice: DataChoice | None) -> Announced:
    """Return what a rank that draws its batches from `choice` announces to its peers."""
    if choice is None:
        return Announced(Kind.DRAW)
    length, _, rest = str(choice).partition(" ")
    return Announced(Kind.DRAW, 1, dtype=length, name=rest)


@dataclass(slots=True)
class DataUses:
    """Checks that a rank draws anew for each step that it commits, under the quorum of that step."""

    choice: DataChoice | None = None
    irregular: int = 0
    """Number of committed steps whose batches were drawn for another quorum, or not at all."""
    has_changed: bool = False
    """Whether `choice` was another one before."""
    _drawn: tuple[int, int] = (-1, -1)

    def drawn(self, choice: DataChoice, step: int, quorum_id: int) -> None:
        """Note that the batches of `step` are drawn from `choice`."""
        self.has_changed |= self.choice not in (None, choice)
        self.choice, self._drawn = choice, (step, quorum_id)

    def committed(self, step: int, quorum_id: int) -> None:
        """Note a committed step in which this rank's batches counted."""
        if self.choice is not None and self._drawn != (step, quorum_id):
            self.irregular += 1

    def report(self, rank_batches: int) -> dict[str, int | bool]:
        """Return the certificate; empty before the first batch. See Agent.data_report."""
        if self.choice is None:
            return {}
        samples = rank_batches * self.choice.accumulate * self.choice.batch_size
        epoch, position = divmod(samples, self.choice.length)
        return {
            **self.choice._asdict(),
            "samples": samples,
            "epoch": epoch,
            "position": position,
            "irregular_steps": self.irregular,
            "is_exact": not self.irregular and not self.has_changed,
        }
