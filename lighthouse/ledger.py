"""What a run has used up: numbers, the documents' counters, and why its generations ended (the newest incidents).

An incident begins when a generation is broken, and ends when the next one forms; whoever dies between belongs to it.
"""

from dataclasses import replace

from lighthouse import iteration
from lighthouse.run_record import Incident, RunRecord
from protos.generation import Counters, RankId

INCIDENTS_KEPT = 64


class Ledger:
    def __init__(self, record: RunRecord) -> None:
        self.counters = record.counters
        self.incidents = record.incidents
        self.formed = record.formed

    @property
    def open_one(self) -> Incident | None:
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.formed is None else None

    def learn(self, seen: int | None, stride: int) -> None:
        """A rank was told of `seen`: every further number is above it."""
        if seen is not None:
            self.counters = iteration.learn(self.counters, seen, stride)

    def begin(self, incident: Incident) -> None:
        self.incidents = (*self.incidents, incident)[-INCIDENTS_KEPT:]
        if incident.is_fault:
            self.counters = iteration.count_incident(self.counters)

    def worsen(self, lost: tuple[RankId, ...], cause: str) -> bool:
        """More is lost before the open one has ended. Whether a mere return has become a fault by it."""
        last = self.open_one
        if last is None:
            return False
        becomes_fault = not last.is_fault
        worse = replace(last, lost=last.lost + lost, is_fault=True, cause=cause if becomes_fault else last.cause)
        self.incidents = (*self.incidents[:-1], worse)
        if becomes_fault:
            self.counters = iteration.count_incident(self.counters)
        return becomes_fault

    def form(self, stride: int, at: float, *, is_process_restart: bool) -> Counters:
        """Those of the next generation, which ends the open incident."""
        last = self.open_one
        self.counters = iteration.advance(
            self.counters,
            stride,
            is_process_restart=is_process_restart,
            after_incident=last is not None and last.is_fault,
        )
        self.formed += 1
        if last is not None:
            ended = replace(last, formed=self.counters.number, formed_at=at)
            self.incidents = (*self.incidents[:-1], ended)
        return self.counters
