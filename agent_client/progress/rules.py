"""Rules of progress: how phase times are computed from marks, and how collectives are numbered.

This module does no I/O. A *mark* is the time at which a phase begins, advances or ends. The time of a phase excludes
nested phases and waits, which are counted separately. In its first step, a process compiles and warms up, so the
longest times until the end of that step are discarded.

A collective has the same number on all ranks, because all ranks run their collectives in the same order. A collective
is numbered when the script requests it, even if another thread runs it later. Collectives over the replica groups are
numbered from the start of the quorum. Between two of these, the collectives inside the group are numbered separately,
because each group may run a different number of them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from lighthouse_protocol.messages.progress import (
    MAX_DEPTH,
    STEP,
    ComputeTotals,
    OpenPhase,
    PhaseCount,
    PhaseTime,
    ProgressSample,
)

WAITING = "(waiting)"
"""Name under which the times of all declared waits are summed."""


class ActivitySample(NamedTuple):
    """What the Agent's background thread is doing: waiting (`sample.waits_for`), working (`busy`) or neither."""

    sample: ProgressSample
    """The sample, without the fields that are computed from marks."""
    busy: str
    since: float
    """Time of the last change, by the clock of the marks."""


@dataclass(eq=False, slots=True)
class Name:
    name: str
    is_wait: bool = False
    total: int | None = None
    """Expected number of ticks in the phase's current or last visit, or None if unknown."""


@dataclass(slots=True)
class _Record:
    ended: int = 0
    ended_before: int = 0
    """Value of `ended` at the start of this step."""
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(slots=True)
class _Visit:
    of: Name
    since: float
    moved_at: float
    done: int = 0
    longest_s: float = 0.0
    nested_s: float = 0.0
    """Time spent in nested visits."""

    def move(self, now: float) -> None:
        still_s = now - self.moved_at
        if still_s > self.longest_s:
            self.longest_s = still_s
        self.moved_at = now

    @property
    def seconds(self) -> float:
        return self.moved_at - self.since - self.nested_s


class PhaseTimes:
    """Computes times per phase from marks. The marks must be passed in the order in which they were made."""

    def __init__(self, root: Name, now: float) -> None:
        self._open = [_Visit(root, now, now)]
        self._records: dict[Name, _Record] = {root: _Record()}
        self._begun = 0
        self._step = 0

    def add_step(self, number: int, now: float) -> None:
        is_first_over = self._begun == 1
        self._begun, self._step = self._begun + 1, number
        self._open[-1].move(now)
        for record in self._records.values():
            record.ended_before = record.ended
        if is_first_over:
            for learned in (*self._records.values(), *self._open):
                learned.longest_s = 0.0

    def add_tick(self, now: float) -> None:
        visit = self._open[-1]
        visit.move(now)
        visit.done += 1

    def enter_phase(self, of: Name, now: float) -> None:
        self._open[-1].move(now)
        self._open.append(_Visit(of, now, now))
        if of not in self._records:
            self._records[of] = _Record()

    def leave_phase(self, of: Name, now: float) -> None:
        """End the innermost visit to a phase, and all visits nested in that visit. Ignore a phase that is not open.

        Visits may end out of order, for example if a generator is closed late.
        """
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

    def make_sample(self, own: ActivitySample, now: float) -> ProgressSample:
        """Return a sample of the rank's progress. `own.busy`, slow work by the Agent, counts as the innermost phase."""
        named = [visit for visit in self._open if not visit.of.is_wait]
        phases = [OpenPhase(visit.of.name, visit.done, visit.of.total, max(0.0, now - visit.since)) for visit in named]
        waits_for = next((visit.of.name for visit in self._open if visit.of.is_wait), own.sample.waits_for)
        if own.busy:
            phases, waits_for = [*phases, OpenPhase(own.busy, open_s=max(0.0, now - own.since))], ""
        return replace(
            own.sample,
            step=self._step,
            phases=tuple(phases[-MAX_DEPTH:]),
            entered=self._entered(Counter(visit.of for visit in named)),
            waits_for=waits_for,
            still_s=max(0.0, now - max(self._open[-1].moved_at, own.since)),
            is_first=self._begun <= 1,
            times=self._times(),
        )

    def _entered(self, open_visits: Counter[Name]) -> tuple[PhaseCount, ...]:
        """Count the visits to each phase in this step, including unfinished visits that began in earlier steps."""
        counts = (
            (of.name, record.ended - record.ended_before + open_visits[of])
            for of, record in self._records.items()
            if not of.is_wait and of.name != STEP
        )
        return tuple(PhaseCount(name, times) for name, times in counts if times)

    def _times(self) -> tuple[PhaseTime, ...]:
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


WARMUP_STEPS = 3
"""Number of committed steps that are not measured after the start of a process, and after each heal."""


class ComputeClock:
    """Measures the compute time of committed steps: from one vote to the next, excluding waits for other ranks.

    Steps in which the rank heals or skips its batch, and the WARMUP_STEPS steps after a heal, are not measured.
    """

    def __init__(self, now: float) -> None:
        self.totals: ComputeTotals | None = None
        self._began_at = now
        self._waited_s = 0.0
        self._waits = 0
        """Number of declared waits that are open."""
        self._waits_since = 0.0
        self._reduces_since: tuple[float, float] | None = None
        self._warmup = WARMUP_STEPS

    def enter_wait(self, now: float) -> None:
        self._waits += 1
        if self._waits == 1:
            self._waits_since = now

    def leave_wait(self, now: float) -> None:
        if self._waits == 1:
            self._waited_s += now - self._waits_since
        self._waits = max(0, self._waits - 1)

    def enter_reduction(self, now: float, collectives_s: float) -> None:
        """Record that the script is waiting for its last reduction.

        Only the time that the process then spends in collectives counts as waiting. The rest counts as compute time,
        because a device may still be computing the tensor. `collectives_s` is the total time in collectives so far.
        """
        if self._reduces_since is None and not self._waits:
            self._reduces_since = now, collectives_s

    def leave_reduction(self, now: float, collectives_s: float) -> None:
        if self._reduces_since is not None:
            since, before_s = self._reduces_since
            self._waited_s += min(now - since, collectives_s - before_s)
            self._reduces_since = None

    def restart(self, now: float) -> None:
        """Start measuring a step at `now`. Discard the time measured since the last vote."""
        self._began_at, self._waited_s, self._waits, self._reduces_since = now, 0.0, 0, None

    def end_step(self, now: float, microbatches: int, *, is_committed: bool, has_healed: bool) -> None:
        seconds = max(0.0, now - self._began_at - self._waited_s)
        self.restart(now)
        if has_healed:
            self._warmup = WARMUP_STEPS
        elif is_committed and self._warmup:
            self._warmup -= 1
        elif is_committed and microbatches:
            before = self.totals or ComputeTotals()
            self.totals = ComputeTotals(before.seconds + seconds, before.microbatches + microbatches)


class Entry(NamedTuple):
    """Position of a collective in the sequence of this process. A new quorum does not restart the count."""

    over_groups: int
    """Number of collectives over the replica groups so far, including this one if it is over the groups."""
    inner: int = 0
    """Number of collectives inside the group since the last one over the groups, including this one, or 0 if this
    collective is over the groups."""


class Number(NamedTuple):
    """Sequence number of a collective, as reported to the manager. Numbering begins again with each quorum."""

    quorum_id: int
    number: int
    """Position in the quorum: even for a collective over the groups, one less for its part inside the group."""
    inner: int = 0


class CollectiveIds:
    """Assigns numbers to collectives. number_of() is thread-safe. Call the other methods from one thread at a time."""

    def __init__(self) -> None:
        self._last = Entry(0)
        self._began = (0, 0)

    @property
    def over_groups(self) -> int:
        return self._last.over_groups

    def over(self) -> Entry:
        self._last = Entry(self._last.over_groups + 1)
        return self._last

    def inside(self) -> Entry:
        self._last = Entry(self._last.over_groups, self._last.inner + 1)
        return self._last

    def begin_quorum(self, quorum_id: int, over_groups: int) -> None:
        """Restart the numbering for a new quorum. Do nothing if `quorum_id` is unchanged.

        `over_groups` is the number of collectives over the groups submitted before the quorum's first step.
        """
        if quorum_id != self._began[0]:
            self._began = (quorum_id, over_groups)

    def number_of(self, entry: Entry, *, within_group: bool) -> Number:
        quorum_id, before = self._began
        number = max(0, 2 * (entry.over_groups - before))
        return Number(quorum_id, max(0, number - (within_group and not entry.inner)), entry.inner)
