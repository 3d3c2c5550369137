"""The counters of a run, computed again from the messages that the lighthouse has received."""

from collections.abc import Container, Mapping

from lighthouse.job import events
from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.messages.run import (
    FailureReport,
    FinishReport,
    Generation,
    RankHello,
    RankId,
    RunCounters,
    RunTerms,
)


class Recount:
    def __init__(self, terms: RunTerms) -> None:
        self._terms = terms
        self._floor = -1
        self._before = RunCounters()
        self._generation: Generation | None = None
        self._here: set[RankId] = set()
        self.finished: set[RankId] = set()
        self._has_fault = False
        self._is_stopped = self._was_stopped = self._is_return_open = False
        self._lapsing: set[RankId] = set()
        self._slots: dict[int, RankId] = {}  # the newest process of each slot in this launch
        self._successors: set[RankId] = set()

    def _learn(self, entry: RankHello) -> None:
        """Learn a number that a rank received from a lighthouse whose journal is lost."""
        told = [number for number in (entry.seen, entry.generation) if number is not None]
        self._floor = max(self._floor, *told, -1)
        if self._slots.setdefault(entry.rank.slot, entry.rank) != entry.rank:
            self._slots[entry.rank.slot] = entry.rank
            self._successors.add(entry.rank)

    def restarted(self, machine: RunMachine) -> None:
        """Forget what the journal does not contain. It counts when it happens again."""
        counters = machine.generations.restarts.counters
        self._floor = counters.number
        self._has_fault = self._generation is not None and counters.job_restarts > self._before.job_restarts
        self.finished = set(machine.generations.current.finished)
        self._here = {rank for rank in self._members if machine.generations.ranks.find_live(rank) is not None}
        self._is_stopped = machine.stop is not None
        self._was_stopped = self._was_stopped or self._is_stopped
        ranks = [] if machine.completed is not None else list(machine.generations.ranks)
        self._slots = {rank.rank.slot: rank.rank for rank in ranks}
        self._successors = {rank.rank for rank in ranks if rank.is_successor}

    @property
    def _members(self) -> tuple[RankId, ...]:
        return self._generation.active if self._generation is not None else ()

    def begin(self, generation: Generation) -> None:
        self._before, self._generation = generation.counters, generation
        self._here, self.finished = set(generation.active), set()
        self._has_fault = self._was_stopped = self._is_return_open = False
        self._floor = -1

    def completed(self) -> None:
        """Begin another launch. Only the numbers continue."""
        self._before = RunCounters(self._before.number, self._before.global_iteration)
        self._generation, self._here, self._has_fault = None, set(), False
        self._slots, self._successors = {}, set()

    def begins(self, machine: RunMachine, event: events.RunEvent | None, now: float) -> None:
        """Note which ranks lapse before the machine handles `event`. They are lost even if they return by it."""
        ranks = [machine.generations.ranks.find_live(rank) for rank in self._members]
        is_late = isinstance(event, events.ProcessPaused)
        gone = {rank.rank for rank in ranks if rank is not None and rank.session is None and rank.lapses_at <= now}
        self._lapsing = set() if is_late else gone & self._here

    def broken_by_a_return(self) -> None:
        self._is_return_open = not self._has_fault

    def handled(self, machine: RunMachine, event: events.RunEvent | None, *, stood: bool) -> None:
        """Count an event after the machine has handled it.

        `stood` is whether the generation was unbroken before. A death after a stop is no incident, but it turns an open
        return into a fault.
        """
        # A refused process ends, and so does one that joins a completed run: the next launch has other processes.
        entry = event.entry if isinstance(event, events.RankJoined) and machine.completed is None else None
        if entry is not None and machine.generations.ranks.find_live(entry.rank) is not None:
            self._learn(entry)
        here = {rank for rank in self._members if machine.generations.ranks.find_live(rank) is not None}
        lost, self._here = (self._here - here | self._lapsing) - self.finished, here
        was_stopped, self._is_stopped = self._is_stopped, machine.stop is not None
        self._was_stopped = self._was_stopped or was_stopped
        if was_stopped or self._generation is None or (self._was_stopped and not self._is_return_open):
            return
        number = self._generation.number
        match event:
            case events.RankReported(rank, FailureReport(generation)) if (
                generation == number and rank in here - self.finished
            ):
                self._has_fault = self._has_fault or stood
            case events.RanksBehind(slots) if any(rank.slot in slots for rank in here - self.finished):
                self._has_fault = self._has_fault or stood
            case events.RankReported(rank, FinishReport(generation)) if generation == number and rank in here and stood:
                self.finished.add(rank)
            case _:
                pass
        self._has_fault = self._has_fault or bool(lost)

    def has_cause(self) -> bool:
        """Return whether the generation may end: after a fault, or if it has room for a newcomer."""
        return self._has_fault or len(self._members) < self._terms.target

    def formed(self, told: RunCounters, attempts: Mapping[RankId, int], fresh: Container[RankId]) -> list[str]:
        """Return what is wrong with the counters. `fresh` contains the ranks that were never active before."""
        before, stride = self._before, self._terms.stride
        base = max(before.number, self._floor)
        is_launch = self._generation is None and base >= 0 and all(rank in fresh for rank in attempts)
        is_restart = is_launch or any(
            rank in fresh and (attempt > 0 or (rank in self._successors and rank.is_supervised))
            for rank, attempt in attempts.items()
        )
        number = (base // stride + 1) * stride if is_restart else base + 1
        iteration = before.global_iteration
        if base > before.number:
            iteration = max(iteration, base // stride * stride)
        if is_restart or stride == 1 or base < 0:
            iteration = number
        expected = RunCounters(
            number,
            iteration,
            before.job_restarts + self._has_fault,
            0 if is_restart else before.ranks_restarts + self._has_fault,
        )
        return [] if told == expected else [f"{told} are told, {expected} were counted after {before}"]
