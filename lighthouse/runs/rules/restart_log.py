"""What a run has used up: numbers, the documents' counters, and why its generations ended (the newest incidents).

An incident begins when a generation is broken, and ends when the next one forms; deaths between belong to it.
"""

from dataclasses import replace

from lighthouse.runs.rules import counters
from lighthouse.runs.rules.record import RestartRecord, RunRecord
from lighthouse_protocol.limits import MAX_LEARNED_GENERATION
from lighthouse_protocol.messages.run import Counters, RankHello, RankId
from lighthouse_protocol.refusals import InvalidRequest

INCIDENTS_KEPT = 64
EVIDENCE_OF = 16  # incidents, the newest
LOST_KEPT = 64  # of one incident, as the lines of evidence
LINES_KEPT = 64


class RestartLog:
    def __init__(self, record: RunRecord) -> None:
        self.counters = record.counters
        self.incidents = record.incidents
        self.formed = record.formed
        self._awaits_step = any(i.formed == self.counters.number and i.stepped_at is None for i in record.incidents)

    @property
    def open_one(self) -> RestartRecord | None:
        last = next((incident for incident in reversed(self.incidents) if not incident.ends_nothing), None)
        return last if last is not None and last.formed is None else None

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

    def begin(self, incident: RestartRecord) -> None:
        self.note(incident)
        if incident.is_fault:
            self.counters = counters.count_incident(self.counters)

    def note(self, incident: RestartRecord) -> None:
        """It ends no generation, and counts nowhere."""
        older = (*self.incidents, incident)[-INCIDENTS_KEPT:]
        if len(older) > EVIDENCE_OF and older[-EVIDENCE_OF - 1].evidence:
            bare = replace(older[-EVIDENCE_OF - 1], evidence=())
            older = (*older[: -EVIDENCE_OF - 1], bare, *older[-EVIDENCE_OF:])
        self.incidents = older

    def worsen(self, lost: tuple[RankId, ...], cause: str) -> bool:
        """More is lost before the open one has ended. Whether a mere return has become a fault by it."""
        last = self.open_one
        if last is None:
            return False
        becomes_fault = not last.is_fault
        more = tuple(rank for rank in lost if rank not in last.lost)
        self._replace(
            last,
            replace(
                last, lost=(last.lost + more)[:LOST_KEPT], is_fault=True, cause=cause if becomes_fault else last.cause
            ),
        )
        if becomes_fault:
            self.counters = counters.count_incident(self.counters)
        return becomes_fault

    def explain(self, rank: RankId, reason: str, output: tuple[str, ...]) -> bool | None:
        """Why a lost process has died. Whether that was news; None: it is in no incident."""
        found = next((incident for incident in reversed(self.incidents) if rank in incident.lost), None)
        if found is None:
            return None
        cause = f"{rank}: {reason}" if found.cause.startswith(f"{rank}: ") else found.cause
        lines = evidence(rank, reason, output)
        known = found.evidence if lines[:1] and lines[0] in found.evidence else (found.evidence + lines)[:LINES_KEPT]
        explained = replace(found, cause=cause, evidence=known)
        self._replace(found, explained)
        return explained != found

    def form(self, stride: int, at: float, *, is_process_restart: bool) -> Counters:
        """Those of the next generation, which ends the open incident."""
        last = self.open_one
        self.counters = counters.advance(
            self.counters,
            stride,
            is_process_restart=is_process_restart,
            after_incident=last is not None and last.is_fault,
        )
        self.formed += 1
        self._awaits_step = last is not None
        if last is not None:
            self._replace(last, replace(last, formed=self.counters.number, formed_at=at))
        return self.counters

    def step(self, at: float) -> bool:
        """A rank of the present generation has done a step: whether it is the first after an incident. O(1) if not."""
        if not self._awaits_step:
            return False
        self._awaits_step = False
        for incident in self.incidents:
            if incident.formed == self.counters.number:
                self._replace(incident, replace(incident, stepped_at=at))
        return True

    def begin_anew(self) -> None:
        """Another launch: numbers go on upwards, and nothing else does."""
        self.counters = Counters(self.counters.number, self.counters.global_iteration)
        self.formed = 0

    def _replace(self, old: RestartRecord, new: RestartRecord) -> None:
        self.incidents = tuple(new if incident is old else incident for incident in self.incidents)


def evidence(rank: RankId, reason: str, output: tuple[str, ...]) -> tuple[str, ...]:
    """What is kept of a dead process's output, with whose it is above it."""
    return (f"{rank}: {reason}", *output) if output else ()
