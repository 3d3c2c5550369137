"""An incident: training stood still, replica groups were lost, or one holds no state any more. What happened when, and
what ranks did. No protobuf.

All offsets are seconds since the fault, by one clock of the lighthouse; None: that has not happened.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from lighthouse_protocol.constraints import Age, Count, Cut, GroupRank, Offset, Output, Text
from lighthouse_protocol.limits import MAX_OUTPUT_CHARS, MAX_OUTPUT_LINES

# -- evidence -----------------------------------------------------------------
#
# What a rank was doing when somebody asked: its stacks, its newest collectives, its process, its output. No protobuf.
#
# Nothing here is certain to be had, of a rank that hangs least of all: what could not be is named, with the reason.

# All of a rank takes at most 64 KiB, and of a replica group 8 MiB.
MAX_RANKS_IN_FULL = 128
MAX_STACKS_BYTES = 32 * 1024
MAX_FLIGHT_RECORDER_BYTES = 12 * 1024
MAX_PROCESS_BYTES = 7 * 1024
MAX_OUTPUT_BYTES = 8 * 1024
MAX_MISSING = 12
MAX_MISSING_BYTES = 240

STACKS_FILE = "lighthouse stacks"
"""The name of the file that a rank's stacks are written to."""

GATHERED_WITHIN_S = 8.0
"""All ranks of a group have given theirs, or are named with what is missing."""


def cut_missing(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(cut_middle(reason, MAX_MISSING_BYTES) for reason in tuple(reasons)[:MAX_MISSING])


def cut_middle(text: str, max_bytes: int) -> str:
    """Text is UTF-8 of at most `max_bytes`; the beginning and the end of what is longer."""
    body = text.encode(errors="replace")
    if len(body) <= max_bytes:
        return body.decode()
    gap = f"\n... {len(body) - max_bytes} bytes and more are left out ...\n"
    kept = max(0, max_bytes - len(gap))
    head, tail = body[: kept // 2], body[len(body) - (kept - kept // 2) :]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


Stacks = Annotated[str, Cut(lambda text: cut_middle(text, MAX_STACKS_BYTES))]
ProcessText = Annotated[str, Cut(lambda text: cut_middle(text, MAX_PROCESS_BYTES))]
Missing = Annotated[tuple[str, ...], Cut(cut_missing)]


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """`stacks` are those of its Python threads; `flight_recorder` is JSON text, a list of collectives, the newest last;
    `process` what /proc says, in lines; `output` its last lines; `missing` what could not be had, and why."""

    group_rank: GroupRank
    rank_incarnation: Text = ""
    pid: Count = 0
    host: Text = ""
    stacks: str = ""
    flight_recorder: str = ""
    process: str = ""
    output: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    took_s: Age = 0.0

    def fitted(self) -> "RankEvidence":
        """On the wire, what is too long is cut: it is for a person to read."""
        return fitting(self)


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """What can be seen of a rank's process from outside, on its host. `is_stopped`: by a signal, so that it says
    nothing itself."""

    stacks: Stacks = ""
    process: ProcessText = ""
    output: Output = ()
    missing: Missing = ()
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class EvidenceAsked:
    """Say what you are doing: answered by a SelfReport of the same number, by a rank that can."""

    number: Count


@dataclass(frozen=True, slots=True)
class SelfReport:
    """What a rank gives of itself, the answer to the request of that number."""

    number: Count
    stacks: Stacks = ""
    flight_recorder: str = ""
    missing: Missing = ()


def fitting(evidence: RankEvidence, ranks: int = 1) -> RankEvidence:
    """The same, cut where it would be too long for a message, or for one of so many `ranks`. JSON that is cut is none:
    it is missing instead."""
    share = min(1.0, MAX_RANKS_IN_FULL / ranks)
    missing, recorder = evidence.missing, evidence.flight_recorder
    size, most = len(recorder.encode(errors="replace")), int(share * MAX_FLIGHT_RECORDER_BYTES)
    if size > most:
        missing, recorder = (*missing, f"Flight Recorder: {size} bytes; {most} are taken"), ""
    return replace(
        evidence,
        stacks=cut_middle(evidence.stacks, int(share * MAX_STACKS_BYTES)),
        flight_recorder=recorder,
        process=cut_middle(evidence.process, int(share * MAX_PROCESS_BYTES)),
        output=_last_lines(evidence.output, int(share * MAX_OUTPUT_BYTES)),
        missing=cut_missing(missing),
    )


def _last_lines(lines: tuple[str, ...], left: int) -> tuple[str, ...]:
    kept: list[str] = []
    for line in reversed(lines[-MAX_OUTPUT_LINES:]):
        shown = cut_middle(line, MAX_OUTPUT_CHARS)
        left -= len(shown.encode())
        if left < 0:
            break
        kept.append(shown)
    return tuple(reversed(kept))


class IncidentKind(StrEnum):
    STALL = "stall"  # nothing moved; the fault is the last move
    LOSS = "loss"  # replica groups were lost; the fault is the last sign of life
    NOT_APPLIED = "not_applied"  # a group has committed a step and not applied it; the fault is when it says so
    DIVERGENCE = "divergence"  # a group's state differs from that of its peers; the fault is when it says so
    NONFINITE = "nonfinite"  # a step was discarded because gradients are not finite; the fault is when a group says so
    RESTART = "restart"  # a generation of a run ended by a fault, whose time is when that was noticed
    EXIT = "exit"  # a supervised process ended that is no rank of a generation


@dataclass(frozen=True, slots=True)
class IncidentSummary:
    """`suspects`: ranks (b/1) that were behind, or groups (b) that were lost or hold no state. `opened_unix_s`: when it
    was noticed.

    `quorum_s` and `quorum_id`: the next quorum that formed, or the next generation of a run; `step_s`: the first step
    that was committed after the fault; `over_s`: something moved again; `back_s`: every lost group was in a quorum
    again.
    """

    id: str
    job: str
    kind: IncidentKind
    text: str
    suspects: tuple[str, ...]
    opened_unix_s: Offset
    noticed_s: Offset
    evidence_s: Offset | None = None
    acted_s: Offset | None = None
    action: str = ""
    quorum_s: Offset | None = None
    quorum_id: int = 0
    step_s: Offset | None = None
    over_s: Offset | None = None
    back_s: Offset | None = None


@dataclass(frozen=True, slots=True)
class MemberEvidence:
    replica_id: str
    rank: RankEvidence

    @property
    def name(self) -> str:
        return f"{self.replica_id}/{self.rank.group_rank}"


@dataclass(frozen=True, slots=True)
class Gathered:
    """`missing`: who gave none, and why."""

    evidence: tuple[MemberEvidence, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Incident:
    summary: IncidentSummary
    evidence: tuple[MemberEvidence, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.summary.id


def suspects_first(evidence: Iterable[MemberEvidence], suspects: Iterable[str]) -> tuple[MemberEvidence, ...]:
    behind = frozenset(suspects)
    return tuple(sorted(evidence, key=lambda e: (e.name not in behind, e.replica_id, e.rank.group_rank)))


# -- as one document: of a file, of the HTTP side, of --format json


def to_document(incident: Incident) -> dict[str, Any]:
    gathered = Gathered(incident.evidence, incident.missing)
    return {**dataclasses.asdict(incident.summary), **gathered_document(gathered)}


def gathered_document(gathered: Gathered) -> dict[str, Any]:
    evidence = [{"replica_id": one.replica_id, **dataclasses.asdict(one.rank)} for one in gathered.evidence]
    return {"evidence": evidence, "missing": list(gathered.missing)}


def from_document(document: Mapping[str, Any]) -> Incident:
    """The inverse; a field that is not known is skipped. Raises ValueError, TypeError, KeyError or AttributeError."""
    given = _known(document, IncidentSummary)
    given["kind"], given["suspects"] = IncidentKind(given["kind"]), tuple(map(str, given["suspects"]))
    evidence = tuple(MemberEvidence(str(one["replica_id"]), _rank(one)) for one in document["evidence"])
    return Incident(IncidentSummary(**given), evidence, tuple(map(str, document["missing"])))


def _rank(document: Mapping[str, Any]) -> RankEvidence:
    given = _known(document, RankEvidence)
    given["output"], given["missing"] = tuple(map(str, given["output"])), tuple(map(str, given["missing"]))
    return RankEvidence(**given)


def _known(document: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: document[name] for name in names if name in document}
