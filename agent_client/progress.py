"""Where this rank is: its step, the phases that its script names, what it waits for, the collective that it is in.

One thread marks (what the Agent does beside it is in own_marks.py), any thread takes samples. Nobody waits for a lock:
a mark replaces one tuple, and a reader that met a mark half done reads again. A mark costs some hundred nanoseconds and
reads the clock once.

The clock of a phase runs only while the phase is the innermost: what is nested in it, and what is waited for, is judged
by itself. The first step of a process (it compiles, it warms up) teaches nothing about the others.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeAlias

from agent_client.numbers import Number, Numbers
from agent_client.own_marks import Act, Done, Inside, OwnMarks, Shape, Torchs
from protos.progress import (
    MAX_DEPTH,
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER,
    STEP,
    OpenPhase,
    PhaseTime,
    Sample,
)

WAITING = "(waiting)"
"""Under this name the time of all declared waits is added up."""

READ_AGAIN_S = 0.0002
READS = 50

# last mark, ticks, longest time without one, seconds of what was nested, entered at, the place around it, the phase,
# version of all records
_Place: TypeAlias = "tuple[float, int, float, float, float, _Place | None, Phase, int]"


Block: TypeAlias = "AbstractContextManager[None]"


class Progress:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never go back."""
        self.clock = clock
        now = clock()
        root = Phase(self, STEP, is_wait=False)
        self.place: _Place = (now, 0, 0.0, 0.0, now, None, root, 0)
        self.version = 0  # that of `place`, but for the moment in which records change
        self.begun = 0
        self.number = 0
        self._phases = {STEP: root}
        self._waits: dict[str, Phase] = {}
        self.own = OwnMarks(clock)

    # -- marks, on the script's thread

    def step(self, number: int) -> None:
        """The rank begins step `number`."""
        now = self.clock()
        at, done, longest_s, nested_s, since, around, phase, version = self.place
        self.version = version = version + 1
        place: _Place = (now, done, max(longest_s, now - at), nested_s, since, around, phase, version)
        is_first_over = self.begun == 1
        self.begun, self.number = self.begun + 1, number
        for known in self._phases.values():
            known.ended_before = known.ended
            if is_first_over:
                known.longest_s = 0.0
        self.place = _unlearned(place) if is_first_over else place

    def tick(self) -> None:
        """One more of the phase's `total` is done; it moves."""
        now = self.clock()
        at, done, longest_s, nested_s, since, around, phase, version = self.place
        gap_s = now - at
        if gap_s > longest_s:
            longest_s = gap_s
        self.place = (now, done + 1, longest_s, nested_s, since, around, phase, version)

    def phase(self, name: str, total: int | None = None) -> Block:
        """A part of the script's work, for as long as the block runs; `total`: how many ticks it will have."""
        try:
            phase = self._phases[name]
        except KeyError:
            phase = self._new(name, self._phases, is_wait=False)
        phase.total = total
        return phase

    def waiting_for(self, what: str) -> Block:
        """In this block the rank waits for others, however long that takes: it is not suspected."""
        return self._waits.get(what) or self._new(what, self._waits, is_wait=True)

    def has_open(self, phase: "Phase") -> bool:
        return any(place[6] is phase for place in _places(self.place))

    def _new(self, name: str, known: "dict[str, Phase]", *, is_wait: bool) -> "Phase":
        name = name[:MAX_NAME_CHARS]
        if len(known) >= MAX_NAMES - 1:
            name = OTHER
        if name not in known:
            known[name] = Phase(self, name, is_wait=is_wait)
        return known[name]

    # -- marks, on the Agent's own thread

    @property
    def numbers(self) -> Numbers:
        return self.own.numbers

    def collective(
        self,
        quorum_id: int,
        number: int,
        operation: str,
        shape: Shape = "",
        *,
        within_group: bool = False,
        inner: int = 0,
    ) -> Block:
        """The rank is in this collective for as long as the block runs, however it ends."""
        return Inside(self.own, Number(quorum_id, number, inner), operation, shape, within_group)

    def torchs(self, operation: str, shape: Shape) -> Torchs:
        """The rank enters a collective of torch's own inside the group."""
        entered = Torchs(self.numbers.inside(), operation, shape, self.clock())
        self.own.enter(entered)
        return entered

    def asking(self, what: str) -> Block:
        """The rank waits for others in this block, whatever its script does beside it."""
        return Act(self.own, what, is_wait=True)

    def busy(self, what: str) -> Block:
        """In this block the Agent does what the script will wait for, and what may take its time."""
        return Act(self.own, what, is_wait=False)

    # -- on any thread

    def sample(self) -> Sample:
        read = self._read()
        for _ in range(READS):
            if read.is_whole:
                break
            time.sleep(READ_AGAIN_S)
            read = self._read()
        return read.sample(self.own.read(), self.clock())

    def _read(self) -> "_Read":
        place, begun, number = self.place, self.begun, self.number
        known = [
            _Record(p, p.ended, p.ended - p.ended_before, p.seconds, p.longest_s)
            for p in (*self._phases.values(), *self._waits.values())
        ]
        return _Read(place, begun, number, known, place[7] == self.version)


class Phase:
    """A name's record, and the block that visits it."""

    __slots__ = ("ended", "ended_before", "is_wait", "longest_s", "name", "progress", "seconds", "total")

    def __init__(self, progress: Progress, name: str, *, is_wait: bool) -> None:
        self.progress, self.name, self.is_wait = progress, name, is_wait
        self.total: int | None = None
        self.ended = self.ended_before = 0  # visits that are over, and those before this step
        self.seconds = self.longest_s = 0.0  # of visits that are over

    def __enter__(self) -> None:
        progress = self.progress
        now = progress.clock()
        around = progress.place
        progress.place = (now, 0, 0.0, 0.0, now, around, self, around[7])

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        progress = self.progress
        now = progress.clock()
        marked_at, _, longest_s, nested_s, since, around, phase, version = progress.place
        if around is None or (phase is not self and not progress.has_open(self)):
            return
        progress.version = version = version + 1
        gap_s = now - marked_at
        if gap_s > longest_s:
            longest_s = gap_s
        if longest_s > phase.longest_s:
            phase.longest_s = longest_s
        visit_s = now - since
        phase.ended += 1
        phase.seconds += visit_s - nested_s
        marked_at, done, longest_s, nested_s, entered_at, outer, around_phase, _ = around
        gap_s = since - marked_at
        if gap_s > longest_s:
            longest_s = gap_s
        progress.place = (now, done, longest_s, nested_s + visit_s, entered_at, outer, around_phase, version)
        if phase is not self:  # an inner block was not left in order, as a generator's may be
            self.__exit__(None, None, None)


class _Record(NamedTuple):
    """Of one phase, as it was read. `seconds` and `longest_s` are of the visits that are over."""

    phase: Phase
    ended: int
    ended_in_step: int
    seconds: float
    longest_s: float


class _Visit(NamedTuple):
    """One that is open; `seconds` of its own and `longest_s` up to the last mark."""

    phase: Phase
    done: int
    since: float
    seconds: float
    longest_s: float


class _Read(NamedTuple):
    """What a reader found; it `is_whole` unless a mark was half done."""

    place: _Place
    begun: int
    number: int
    known: list[_Record]
    is_whole: bool

    def sample(self, own: Done, now: float) -> Sample:
        """What the Agent is busy with is where the rank is: the script waits for that, or does something beside it."""
        visits = _visits(self.place)
        named = [visit for visit in visits if not visit.phase.is_wait]
        phases = [
            OpenPhase(visit.phase.name, visit.done, visit.phase.total, max(0.0, now - visit.since)) for visit in named
        ]
        waits_for = next((visit.phase.name for visit in visits if visit.phase.is_wait), own.waits_for)
        if own.busy:
            phases, waits_for = [*phases, OpenPhase(own.busy, open_s=max(0.0, now - own.since))], ""
        return Sample(
            step=self.number,
            phases=tuple(phases[-MAX_DEPTH:]),
            entered=self._entered(Counter(visit.phase for visit in named)),
            collective=own.collective,
            waits_for=waits_for,
            still_s=max(0.0, now - max(self.place[0], own.since)),
            is_first=self.begun <= 1,
            times=self._times(visits),
        )

    def _entered(self, open_visits: Counter[Phase]) -> tuple[tuple[str, int], ...]:
        """A visit that began in an earlier step counts in this one, too."""
        counts = (
            (record.phase.name, record.ended_in_step + open_visits[record.phase])
            for record in self.known
            if not record.phase.is_wait and record.phase.name != STEP
        )
        return tuple((name, times) for name, times in counts if times)

    def _times(self, visits: "list[_Visit]") -> tuple[PhaseTime, ...]:
        """With what the open visits have taken up to their last mark."""
        times: dict[str, PhaseTime] = {}
        for phase, ended, seconds, longest_s in (
            *((r.phase, r.ended, r.seconds, r.longest_s) for r in self.known),
            *((v.phase, 0, v.seconds, v.longest_s) for v in visits),
        ):
            name = WAITING if phase.is_wait else phase.name
            before = times.get(name, PhaseTime(name, 0, 0.0, 0.0))
            longest_s = 0.0 if phase.is_wait else max(before.longest_s, longest_s)
            times[name] = PhaseTime(name, before.visits + ended, before.seconds + seconds, longest_s)
        return tuple(time for time in times.values() if time.visits or time.seconds)


def _places(place: _Place) -> list[_Place]:
    """Of all open phases, the innermost first."""
    places = [place]
    while (around := places[-1][5]) is not None:
        places.append(around)
    return places


def _visits(place: _Place) -> list[_Visit]:
    """The outermost first. One around another has its last mark where that was entered."""
    visits: list[_Visit] = []
    last_mark_at = place[0]
    for at, done, longest_s, nested_s, since, _, phase, _ in _places(place):
        longest_s = max(longest_s, last_mark_at - at)
        visits.append(_Visit(phase, done, since, last_mark_at - since - nested_s, longest_s))
        last_mark_at = since
    return visits[::-1]


def _unlearned(place: _Place) -> _Place:
    """With what the open phases have learned forgotten. One around another has its last mark where that was entered."""
    at, done, _, nested_s, since, around, phase, version = place
    if around is not None:
        around = _unlearned((since, *around[1:]))
    return (at, done, 0.0, nested_s, since, around, phase, version)
