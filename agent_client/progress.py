"""Where this rank is: its step, the phases that its script names, what it waits for, the collective that it is in.

One thread marks (collectives have a thread of their own), any thread takes samples. Nobody waits for a lock: a mark
replaces one tuple, and a reader that met a mark half done reads again. A mark costs some hundred nanoseconds and reads
the clock once.

The clock of a phase runs only while the phase is the innermost: what is nested in it, and what is waited for, is judged
by itself. The first step of a process (it compiles, it warms up) teaches nothing about the others.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, TypeAlias

from protos.progress import MAX_DEPTH, MAX_NAME_CHARS, MAX_NAMES, STEP, Collective, OpenPhase, PhaseTime, Sample

WAITING = "(waiting)"
"""Under this name the time of all declared waits is added up."""
OTHER = "(other)"
"""Stands for every phase beyond MAX_NAMES."""

READ_AGAIN_S = 0.0002
READS = 50

# visits that are over, own seconds, longest time without a mark
_Spent: TypeAlias = tuple[int, float, float]
# entered at, where the phase around it is, its name's record, total
_Frame: TypeAlias = "tuple[float, _Place | None, Phase, int | None]"
# last mark, ticks, longest time without a mark, seconds of what was nested, the phase, version of all records
_Place: TypeAlias = "tuple[float, int, float, float, _Frame, int]"


class Progress:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never go back."""
        self.clock = clock
        now = clock()
        root = Phase(self, STEP, is_wait=False)
        self.place: _Place = (now, 0, 0.0, 0.0, (now, None, root, None), 0)
        self.version = 0  # that of `place`, but for the moment in which records change
        self.begun = 0
        self._number = 0
        self._phases = {STEP: root}
        self._waits: dict[str, Phase] = {}
        self._collective: tuple[Collective | None, float] = (None, now)

    # -- marks, on the script's thread

    def step(self, number: int) -> None:
        """The rank begins step `number`."""
        now = self.clock()
        at, done, longest_s, nested_s, frame, version = self.place
        self.version = version + 1
        is_first_over = self.begun == 1
        self.begun, self._number = self.begun + 1, number
        place: _Place = (now, done, max(longest_s, now - at), nested_s, frame, version + 1)
        if is_first_over:
            for phase in self._phases.values():
                visits, own_s, _ = phase.spent
                phase.spent = (visits, own_s, 0.0)
            place = _unlearned(place)
        self.place = place

    def tick(self) -> None:
        """One more of the phase's `total` is done; it moves."""
        now = self.clock()
        at, done, longest_s, nested_s, frame, version = self.place
        gap_s = now - at
        self.place = (now, done + 1, gap_s if gap_s > longest_s else longest_s, nested_s, frame, version)

    def phase(self, name: str, total: int | None = None) -> "Phase":
        """A part of the script's work, for as long as the block runs; `total`: how many ticks it will have."""
        phase = self._phases.get(name) or self._new(name, self._phases, is_wait=False)
        phase.total = total
        return phase

    def waiting_for(self, what: str) -> "Phase":
        """In this block the rank waits for others, however long that takes: it is not suspected."""
        return self._waits.get(what) or self._new(what, self._waits, is_wait=True)

    def has_open(self, phase: "Phase") -> bool:
        return any(place[4][2] is phase for place in _places(self.place))

    def _new(self, name: str, known: "dict[str, Phase]", *, is_wait: bool) -> "Phase":
        name = name[:MAX_NAME_CHARS]
        if len(known) >= MAX_NAMES - 1:
            name = OTHER
        if name not in known:
            known[name] = Phase(self, name, is_wait=is_wait)
        return known[name]

    # -- marks, on the thread of the collectives

    @contextmanager
    def collective(
        self, quorum_id: int, number: int, operation: str, shape: str = "", *, within_group: bool = False
    ) -> Generator[None]:
        """The rank is in this collective for as long as the block runs, however it ends."""
        here = Collective(quorum_id, number, operation, shape, within_group=within_group)
        self._collective = (here, self.clock())
        try:
            yield
        finally:
            self._collective = (replace(here, is_inside=False), self.clock())

    # -- on any thread

    def sample(self) -> Sample:
        read = self._read()
        for _ in range(READS):
            if read.is_whole:
                break
            time.sleep(READ_AGAIN_S)
            read = self._read()
        return read.sample(self._collective, self.clock())

    def _read(self) -> "_Read":
        place, begun, number = self.place, self.begun, self._number
        known = [(p, p.entered, p.spent) for p in (*self._phases.values(), *self._waits.values())]
        return _Read(place, begun, number, known, place[5] == self.version)


class Phase:
    """A name's record, and the block that visits it."""

    __slots__ = ("entered", "is_wait", "name", "progress", "spent", "total")

    def __init__(self, progress: Progress, name: str, *, is_wait: bool) -> None:
        self.progress, self.name, self.is_wait = progress, name, is_wait
        self.total: int | None = None
        self.entered: tuple[int, int] = (0, 0)  # in which step, how often
        self.spent: _Spent = (0, 0.0, 0.0)

    def __enter__(self) -> None:
        progress = self.progress
        now = progress.clock()
        at, done, longest_s, nested_s, frame, version = progress.place
        progress.version = version = version + 1
        begun, times = self.entered
        self.entered = (begun, times + 1) if begun == progress.begun else (progress.begun, 1)
        gap_s = now - at
        around = (now, done, gap_s if gap_s > longest_s else longest_s, nested_s, frame, version)
        progress.place = (now, 0, 0.0, 0.0, (now, around, self, self.total), version)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        progress = self.progress
        now = progress.clock()
        marked_at, _, longest_s, nested_s, (since, around, phase, _), version = progress.place
        if around is None or (phase is not self and not progress.has_open(self)):
            return
        progress.version = version = version + 1
        visits, own_s, known_s = phase.spent
        gap_s = now - marked_at
        if gap_s > longest_s:
            longest_s = gap_s
        phase.spent = (visits + 1, own_s + now - since - nested_s, longest_s if longest_s > known_s else known_s)
        _, done, longest_s, nested_s, frame, _ = around
        progress.place = (now, done, longest_s, nested_s + now - since, frame, version)
        if phase is not self:  # an inner block was not left in order, as a generator's may be
            self.__exit__(None, None, None)


class _Read(NamedTuple):
    """What a reader found; it `is_whole` unless a mark was half done."""

    place: _Place
    begun: int
    number: int
    known: list[tuple[Phase, tuple[int, int], _Spent]]
    is_whole: bool

    def sample(self, collective: tuple[Collective | None, float], now: float) -> Sample:
        places = _places(self.place)
        named = [place for place in places if not place[4][2].is_wait]
        return Sample(
            step=self.number,
            phases=tuple(OpenPhase(p[4][2].name, p[1], p[4][3], max(0.0, now - p[4][0])) for p in named[-MAX_DEPTH:]),
            entered=self._entered({place[4][2].name for place in named}),
            collective=collective[0],
            waits_for=next((place[4][2].name for place in places if place[4][2].is_wait), ""),
            still_s=max(0.0, now - max(self.place[0], collective[1])),
            is_first=self.begun <= 1,
            times=self._times(places),
        )

    def _entered(self, open_names: set[str]) -> tuple[tuple[str, int], ...]:
        """A phase that is open since an earlier step counts as entered once."""
        counts = (
            (phase.name, times if begun == self.begun else int(phase.name in open_names))
            for phase, (begun, times), _ in self.known
            if not phase.is_wait and phase.name != STEP
        )
        return tuple((name, times) for name, times in counts if times)

    def _times(self, places: list[_Place]) -> tuple[PhaseTime, ...]:
        """With what the open visits have taken up to their last mark."""
        times = {WAITING: PhaseTime(WAITING, 0, 0.0, 0.0)}
        spent = [(phase, *spent) for phase, _, spent in self.known]
        spent += [(p[4][2], 0, p[0] - p[4][0] - p[3], p[2]) for p in places]
        for phase, visits, seconds, longest_s in spent:
            name = WAITING if phase.is_wait else phase.name
            before = times.get(name, PhaseTime(name, 0, 0.0, 0.0))
            longest_s = 0.0 if phase.is_wait else max(before.longest_s, longest_s)
            times[name] = PhaseTime(name, before.visits + visits, before.seconds + seconds, longest_s)
        return tuple(time for time in times.values() if time.visits or time.seconds)


def _places(place: _Place) -> list[_Place]:
    """Of all open phases, the outermost first."""
    places = [place]
    while (around := places[-1][4][1]) is not None:
        places.append(around)
    return places[::-1]


def _unlearned(place: _Place) -> _Place:
    """With what the open phases have learned forgotten."""
    at, done, _, nested_s, (since, around, phase, total), version = place
    around = None if around is None else _unlearned(around)
    return (at, done, 0.0, nested_s, (since, around, phase, total), version)
