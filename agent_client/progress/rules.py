"""What the marks of a rank amount to: the phases that are open, how often each was entered, and what it took. No I/O.

The clock of a phase runs only while the phase is the innermost: what is nested in it, and what is waited for, is judged
by itself. The first step of a process (it compiles, it warms up) teaches nothing about the others.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lighthouse_protocol.messages.progress import (
    MAX_DEPTH,
    STEP,
    Collective,
    DataUse,
    GroupCalls,
    HealProgress,
    HealTotals,
    OpenPhase,
    PhaseCount,
    PhaseTime,
    ProgressSample,
    RejectedStep,
)

WAITING = "(waiting)"
"""Under this name the time of all declared waits is added up."""


class ActivitySample(NamedTuple):
    """As it was read. `waits_for` others, or is `busy` with something of its own: at most one of the two is told."""

    collective: Collective | None
    waits_for: str
    busy: str
    since: float
    calls: tuple[GroupCalls, ...] = ()
    healed: HealTotals | None = None
    heal: HealProgress | None = None
    rejected: RejectedStep | None = None
    data: DataUse | None = None


@dataclass(eq=False, slots=True)
class Name:
    """Of a phase, or of what is waited for. `total`: of ticks, as it was told last."""

    name: str
    is_wait: bool = False
    total: int | None = None


@dataclass(slots=True)
class _Record:
    """Of the visits that are over; `ended_before` this step."""

    ended: int = 0
    ended_before: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(slots=True)
class _Visit:
    """One that is open. `longest_s`: without a mark, up to the last one, `moved_at`; `nested_s`: of what was inside."""

    of: Name
    since: float
    moved_at: float
    done: int = 0
    longest_s: float = 0.0
    nested_s: float = 0.0

    def move(self, now: float) -> None:
        still_s = now - self.moved_at
        if still_s > self.longest_s:
            self.longest_s = still_s
        self.moved_at = now

    @property
    def seconds(self) -> float:
        """Its own, up to the last mark."""
        return self.moved_at - self.since - self.nested_s


class PhaseTimes:
    """Marks come in the order in which they were made."""

    def __init__(self, root: Name, now: float) -> None:
        """`root`: what the rank is in where it is in nothing else."""
        self._open = [_Visit(root, now, now)]
        self._records: dict[Name, _Record] = {root: _Record()}
        self._begun = 0
        self._step = 0

    def step(self, number: int, now: float) -> None:
        is_first_over = self._begun == 1
        self._begun, self._step = self._begun + 1, number
        self._open[-1].move(now)
        for record in self._records.values():
            record.ended_before = record.ended
        if is_first_over:
            for learned in (*self._records.values(), *self._open):
                learned.longest_s = 0.0

    def tick(self, now: float) -> None:
        visit = self._open[-1]
        visit.move(now)
        visit.done += 1

    def enter(self, of: Name, now: float) -> None:
        self._open[-1].move(now)
        self._open.append(_Visit(of, now, now))
        if of not in self._records:
            self._records[of] = _Record()

    def leave(self, of: Name, now: float) -> None:
        """And what is inside it, which was not left in order, as a generator's may be."""
        if len(self._open) == 1 or not (self._open[-1].of is of or any(visit.of is of for visit in self._open[1:])):
            return
        while self._leave_innermost(now) is not of:
            pass

    def _leave_innermost(self, now: float) -> Name:
        visit = self._open.pop()
        visit.move(now)
        record = self._records[visit.of]
        record.ended += 1
        record.seconds += visit.seconds
        if visit.longest_s > record.longest_s:
            record.longest_s = visit.longest_s
        around = self._open[-1]
        around.nested_s += now - visit.since
        around.moved_at = now
        return visit.of

    # -- read

    def sample(self, own: ActivitySample, now: float) -> ProgressSample:
        """What the Agent is busy with is where the rank is: the script waits for that, or does something beside it."""
        named = [visit for visit in self._open if not visit.of.is_wait]
        phases = [OpenPhase(visit.of.name, visit.done, visit.of.total, max(0.0, now - visit.since)) for visit in named]
        waits_for = next((visit.of.name for visit in self._open if visit.of.is_wait), own.waits_for)
        if own.busy:
            phases, waits_for = [*phases, OpenPhase(own.busy, open_s=max(0.0, now - own.since))], ""
        return ProgressSample(
            step=self._step,
            phases=tuple(phases[-MAX_DEPTH:]),
            entered=self._entered(Counter(visit.of for visit in named)),
            collective=own.collective,
            waits_for=waits_for,
            still_s=max(0.0, now - max(self._open[-1].moved_at, own.since)),
            is_first=self._begun <= 1,
            times=self._times(),
            calls=own.calls,
            healed=own.healed,
            heal=own.heal,
            rejected=own.rejected,
            data=own.data,
        )

    def _entered(self, open_visits: Counter[Name]) -> tuple[PhaseCount, ...]:
        """A visit that began in an earlier step counts in this one, too."""
        counts = (
            (of.name, record.ended - record.ended_before + open_visits[of])
            for of, record in self._records.items()
            if not of.is_wait and of.name != STEP
        )
        return tuple(PhaseCount(name, times) for name, times in counts if times)

    def _times(self) -> tuple[PhaseTime, ...]:
        """With what the open visits have taken up to their last mark."""
        times: dict[str, PhaseTime] = {}
        for of, ended, seconds, longest_s in (
            *((of, r.ended, r.seconds, r.longest_s) for of, r in self._records.items()),
            *((visit.of, 0, visit.seconds, visit.longest_s) for visit in self._open),
        ):
            name = WAITING if of.is_wait else of.name
            before = times.get(name, PhaseTime(name, 0, 0.0, 0.0))
            longest_s = 0.0 if of.is_wait else max(before.longest_s, longest_s)
            times[name] = PhaseTime(name, before.visits + ended, before.seconds + seconds, longest_s)
        return tuple(time for time in times.values() if time.visits or time.seconds)


# -- collective ids -----------------------------------------------------------
#
# The numbers of a rank's collectives: the same at all ranks, since a script's order of them is. No I/O.
#
# They are given out when the script asks for a collective, whichever thread does it later. Those over all replica
# groups count from the quorum on; in between, those inside the group count by themselves: another group may have more
# of them.


class Entry(NamedTuple):
    """`over_groups`: the number of collectives over the groups requested so far, including this one unless it is inside
    the group. `inner`: this is the n-th collective inside the group since then; 0: it is over the groups."""

    over_groups: int
    inner: int = 0


class Number(NamedTuple):
    """As reported. Each collective over the groups has two: its part inside the group comes first."""

    quorum_id: int
    number: int
    inner: int


class CollectiveIds:
    """For one thread at a time; `told` for any."""

    def __init__(self) -> None:
        self._last = Entry(0)
        self._began = (0, 0)

    @property
    def over_groups(self) -> int:
        """How many were requested."""
        return self._last.over_groups

    def over(self) -> Entry:
        """The next one over all groups."""
        self._last = Entry(self._last.over_groups + 1)
        return self._last

    def inside(self) -> Entry:
        """The next one inside the group."""
        self._last = Entry(self._last.over_groups, self._last.inner + 1)
        return self._last

    def begin(self, quorum_id: int, over_groups: int) -> None:
        """Count from `over_groups` on under that quorum: the number requested before its first step."""
        if quorum_id != self._began[0]:
            self._began = (quorum_id, over_groups)

    def told(self, entry: Entry, *, within_group: bool) -> Number:
        quorum_id, before = self._began
        number = max(0, 2 * (entry.over_groups - before))
        return Number(quorum_id, max(0, number - (within_group and not entry.inner)), entry.inner)
