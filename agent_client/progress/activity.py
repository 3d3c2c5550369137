"""Records what the Agent's background thread is doing. Any thread can read the record.

The background thread may be running a collective, waiting for a quorum or for peers, or receiving a peer's state, while
the script's thread is computing or waiting for the background thread. Collectives that torch's modules run inside the
group are also recorded here (collectives/observed.py).

The Agent's and the script's threads record independently and without a lock, because recording replaces a single tuple.
Text is formatted only when a sample is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from agent_client.progress.rules import ActivitySample, CollectiveIds, Entry, Number
from agent_client.progress.script_groups import ScriptGroups
from lighthouse_protocol.messages.progress import (
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    Collective,
    DataUse,
    HealProgress,
    HealTotals,
    ProgressSample,
    RejectedStep,
)

KEPT_S = 15.0
"""Time in seconds for which a finished heal is still reported, so that every reader sees its end."""


class HealMark:
    """Progress of one heal. The thread that receives the state updates it. Any thread may read it, without a lock."""

    def __init__(self, number: int, source: str, step: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.moved_at = clock()
        self._clock = clock
        self._step = step
        self._at: tuple[str, int, int | None] = (source, 0, None)
        self._began_at = self.moved_at
        self._ended_at: float | None = None
        self._has_failed = False

    def record_bytes(self, source: str, received: int, total: int) -> None:
        """Record that `received` of `total` bytes have arrived. `received` may restart at 0 when the source changes."""
        self._at = (source, received, total)
        self.moved_at = self._clock()

    def mark_done(self) -> None:
        self._ended_at = self._clock()

    def mark_failed(self) -> None:
        self._has_failed = True

    def to_message(self) -> HealProgress | None:
        """Return the progress, or None if the heal has failed, or if it finished at least KEPT_S ago."""
        now, ended_at = self._clock(), self._ended_at
        if self._has_failed or (ended_at is not None and now >= ended_at + KEPT_S):
            return None
        source, received, total = self._at
        seconds = (now if ended_at is None else ended_at) - self._began_at
        return HealProgress(
            self.number, source[:MAX_LABEL_CHARS], self._step, received, total, seconds, ended_at is not None
        )


REJECTED_KEPT_S = 30.0
"""Time in seconds for which a rejected step is reported. The lighthouse receives the report, and opens an incident,
even if it is unreachable for part of this time."""

Shape: TypeAlias = "str | Sequence[int]"


class Activity:
    """Record of what the Agent's background thread is doing, and totals of the process's heals and collectives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.numbers = CollectiveIds()
        self.collective: tuple[CollectiveBlock | None, bool, float, float] = (None, False, clock(), 0.0)
        """Newest collective, whether it is running, time of the last change, and seconds in all collectives before."""
        self.act: tuple[ActivityBlock | None, float] = (None, clock())
        self.torch_collectives: tuple[TorchCollective, ...] = ()  # all that are running, and the newest
        self.script_groups = ScriptGroups(clock)
        self.healed: HealTotals | None = None
        self.heal: HealMark | None = None  # the newest heal
        self.rejected: tuple[RejectedStep | None, float] = (None, clock())
        self.data: Callable[[], DataUse | None] = lambda: None

    def heal_begins(self, source: str, step: int) -> HealMark:
        number = 1 if self.heal is None else self.heal.number + 1
        self.heal = HealMark(number, source, step, self.clock)
        return self.heal

    def heal_received(self, seconds: float, nbytes: int) -> None:
        before = self.healed or HealTotals()
        self.healed = HealTotals(before.heals + 1, before.seconds + seconds, before.bytes + nbytes)

    def reject(self, step: int, reason: str, *, is_own: bool) -> None:
        self.rejected = (RejectedStep(step, reason, is_own), self.clock())

    def take_sample(self) -> ActivitySample:
        (inside, is_inside, moved_at, _), (act, since) = self.collective, self.act
        own = None if inside is None else inside.to_message(is_inside)
        torchs, torchs_at = self._read_torch_collective()
        collective = max((c for c in (own, torchs) if c is not None), key=_unfinished_first, default=None)
        what = act.what[:MAX_NAME_CHARS] if act is not None else ""
        waits_for, busy = (what, "") if act is None or act.is_wait else ("", what)
        calls = self.script_groups.read_calls()
        heal = self.heal.to_message() if self.heal is not None else None
        healed_at = self.heal.moved_at if self.heal is not None else since
        moved_at = max(moved_at, since, torchs_at, self.script_groups.moved_at, healed_at)
        rejected, rejected_at = self.rejected
        rejected = rejected if self.clock() < rejected_at + REJECTED_KEPT_S else None
        sample = ProgressSample(
            collective=collective,
            waits_for=waits_for,
            calls=calls,
            healed=self.healed,
            heal=heal,
            rejected=rejected,
            data=self.data(),
        )
        return ActivitySample(sample, busy, moved_at)

    def collectives_s(self, now: float) -> float:
        """Return the time in seconds that the Agent has spent in collectives."""
        _, is_inside, moved_at, before_s = self.collective
        return before_s + (now - moved_at if is_inside else 0.0)

    def add_collective(self, newest: "TorchCollective") -> None:
        running = [each for each in self.torch_collectives if each.is_running(self.clock)]
        self.torch_collectives = (*running, newest)

    def _read_torch_collective(self) -> tuple[Collective | None, float]:
        """Return torch's oldest running collective, and the time when a collective was last entered or left.

        Later collectives wait for the oldest. If none is running, return the newest, or None before the first.
        """
        entered = self.torch_collectives
        if not entered:
            return None, 0.0
        oldest = next((each for each in entered if each.is_running(self.clock)), entered[-1])
        return oldest.to_message(self.numbers), max(each.at for each in entered)


def _unfinished_first(collective: Collective) -> tuple[bool, tuple[int, int, int]]:
    return collective.is_inside, collective.order


@dataclass(slots=True, eq=False)
class CollectiveBlock:
    activity: Activity
    number: Number
    operation: str
    shape: Shape
    within_group: bool

    def __enter__(self) -> None:
        self.activity.collective = (self, True, self.activity.clock(), self.activity.collective[3])

    def __exit__(self, *_: object) -> None:
        now = self.activity.clock()
        self.activity.collective = (self, False, now, self.activity.collectives_s(now))

    def to_message(self, is_inside: bool) -> Collective:
        return _collective(self.number, self.operation, self.shape, is_inside, self.within_group)


class Work(Protocol):
    def is_completed(self) -> bool: ...


@dataclass(slots=True, eq=False)
class TorchCollective:
    """A collective that a torch module runs inside the group. The Agent polls for its end: torch reports none."""

    entry: Entry
    operation: str
    shape: Shape
    at: float
    work: Work | None = None
    is_inside: bool = True

    def runs(self, work: Work | None) -> None:
        """Set torch's Work object of the running collective, or None if the collective has completed."""
        self.work, self.is_inside = work, work is not None

    def is_running(self, clock: Callable[[], float]) -> bool:
        work = self.work
        if work is not None and work.is_completed():
            self.at = clock()
            self.runs(None)  # drop the work, whose tensors may be large
        return self.is_inside

    def to_message(self, numbers: CollectiveIds) -> Collective:
        number = numbers.number_of(self.entry, within_group=True)
        return _collective(number, self.operation, self.shape, self.is_inside, True)


def format_shape(shape: Shape) -> str:
    return shape if isinstance(shape, str) else "x".join(map(str, shape))


def _collective(number: Number, operation: str, shape: Shape, is_inside: bool, within_group: bool) -> Collective:
    name, label = operation[:MAX_NAME_CHARS], format_shape(shape)[:MAX_LABEL_CHARS]
    return Collective(number.quorum_id, number.number, name, label, is_inside, within_group, number.inner)


@dataclass(slots=True, eq=False)
class ActivityBlock:
    activity: Activity
    what: str
    is_wait: bool

    def __enter__(self) -> None:
        self.activity.act = (self, self.activity.clock())

    def __exit__(self, *_: object) -> None:
        self.activity.act = (None, self.activity.clock())
