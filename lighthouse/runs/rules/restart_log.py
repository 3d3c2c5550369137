"""What a run has used up: numbers, the restart counters, and why its generations ended (the newest restarts).

A restart begins when a generation is broken, and ends when the next one forms; deaths between belong to it.
"""

from collections.abc import Callable
from dataclasses import replace

from lighthouse.runs.rules import counters
from lighthouse.runs.rules.events import IncidentChanged
from lighthouse.runs.rules.record import RestartRecord, RunRecord
from lighthouse_protocol.limits import MAX_LEARNED_GENERATION
from lighthouse_protocol.messages.run import RankHello, RankId, RunCounters
from lighthouse_protocol.messages.supervisor import ProcessLost
from lighthouse_protocol.refusals import InvalidRequest

KEPT = 16
"""Restarts that a late report may still explain; all are in the archive of incidents."""
LOST_KEPT = 64  # of one restart
EVIDENCE_KEPT = 8  # dead processes of one restart, with their output


class RestartLog:
    """`make_id` makes an unused id of a moment of the wall clock; `emit` gets each incident that changes."""

    def __init__(
        self, record: RunRecord, make_id: Callable[[float], str], emit: Callable[[IncidentChanged], None]
    ) -> None:
        self.counters = record.counters
        self.restarts = record.restarts
        self.formed = record.formed
        self._make_id = make_id
        self._emit = emit
        self._awaits_step = any(r.formed == self.counters.number and r.stepped_at is None for r in record.restarts)

    @property
    def open_one(self) -> RestartRecord | None:
        newest = self._newest
        return newest if newest is not None and newest.formed is None else None

    @property
    def _newest(self) -> RestartRecord | None:
        """That ended a generation."""
        return next((restart for restart in reversed(self.restarts) if not restart.ends_nothing), None)

    @property
    def last_cause(self) -> str:
        """Why the last generation that was broken was."""
        return "" if self._newest is None else self._newest.cause

    def refusal(self, entry: RankHello) -> InvalidRequest | None:
        """It was told of a number that this run cannot have come to: it is not adopted."""
        most = max(self.counters.number, MAX_LEARNED_GENERATION)
        for field, number in (("seen", entry.seen), ("generation", entry.generation)):
            if number is not None and number > most:
                return InvalidRequest(
                    f"is {number}; this run is at generation {self.counters.number}, and none comes to {most}; "
                    "start the process again",
                    field=field,
                )
        return None

    def learn(self, seen: int | None, stride: int) -> None:
        """A rank was told of `seen`: every further number is above it."""
        if seen is not None:
            self.counters = counters.learn(self.counters, seen, stride)

    def begin(self, number: int, cause: str, at: float, lost: tuple[RankId, ...], *, is_fault: bool) -> None:
        """Generation `number` is broken, by a fault or by the return of a rank."""
        self._add(RestartRecord(number, cause, at, self._make_id(at) if is_fault else "", lost))
        if is_fault:
            self.counters = counters.count_incident(self.counters)

    def worsen(self, lost: tuple[RankId, ...], cause: str) -> bool:
        """More is lost before the open one has ended. Whether a mere return has become a fault by it."""
        last = self.open_one
        if last is None:
            return False
        more = tuple(rank for rank in lost if rank not in last.lost)
        worse = replace(last, lost=(last.lost + more)[:LOST_KEPT])
        if last.incident:
            self._replace(last, worse)
            return False
        self._replace(last, replace(worse, cause=cause, incident=self._make_id(last.noticed_at)))
        self.counters = counters.count_incident(self.counters)
        return True

    def explain(self, process: ProcessLost, by: str, number: int, at: float, *, is_rank: bool) -> None:
        """A supervisor says why a process died: of a rank that was lost, or, unless `is_rank`, of one that was none:
        that is an incident of its own, which ends no generation and counts nowhere."""
        rank = process.rank
        found = next((restart for restart in reversed(self.restarts) if rank in restart.lost), None)
        if found is not None:
            if all(known.rank != rank for known in found.evidence):
                cause = f"{rank}: {process.reason}" if found.cause.startswith(f"{rank}: ") else found.cause
                evidence = (*found.evidence, process)[:EVIDENCE_KEPT]
                self._replace(found, replace(found, cause=cause, evidence=evidence))
        elif not is_rank:
            cause = f"{rank}{f' of {by}' if by else ''}: {process.reason}"
            incident = self._make_id(at)
            self._add(RestartRecord(number, cause, at, incident, (rank,), evidence=(process,), ends_nothing=True))

    def form(self, stride: int, at: float, *, is_process_restart: bool) -> RunCounters:
        """Those of the next generation, which ends the open restart."""
        last = self.open_one
        self.counters = counters.advance(
            self.counters,
            stride,
            is_process_restart=is_process_restart,
            after_incident=last is not None and bool(last.incident),
        )
        self.formed += 1
        self._awaits_step = last is not None
        if last is not None:
            self._replace(last, replace(last, formed=self.counters.number, formed_at=at))
        return self.counters

    def step(self, at: float) -> None:
        """A rank of the present generation has done a step. O(1) unless it is the first after a restart."""
        if not self._awaits_step:
            return
        self._awaits_step = False
        for restart in self.restarts:
            if restart.formed == self.counters.number:
                self._replace(restart, replace(restart, stepped_at=at))

    def begin_anew(self) -> None:
        """Another launch: numbers go on upwards, and nothing else does."""
        self.counters = RunCounters(self.counters.number, self.counters.global_iteration)
        self.formed = 0

    def _add(self, restart: RestartRecord) -> None:
        """What is still followed outlives any number of processes that end no generation."""
        followed = self._newest
        self.restarts = (*self.restarts, restart)[-KEPT:]
        if followed is not None and restart.ends_nothing and followed not in self.restarts:
            self.restarts = (followed, *self.restarts[1:])
        self._report(restart)

    def _replace(self, old: RestartRecord, new: RestartRecord) -> None:
        self.restarts = tuple(new if restart is old else restart for restart in self.restarts)
        self._report(new)

    def _report(self, restart: RestartRecord) -> None:
        if restart.incident:
            self._emit(IncidentChanged(restart))
