"""Incidents and the evidence that is collected for them.

An incident records a fault, such as a stall, the loss of replica groups or an unusable model state (see IncidentKind).
All offsets are seconds since the fault, by the lighthouse's clock, or None if the event has not happened.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from lighthouse_protocol.constraints import Age, Count, GroupRank, Offset, Output, Shortened, Text
from lighthouse_protocol.limits import MAX_OUTPUT_CHARS, MAX_OUTPUT_LINES

# Evidence shows what a rank was doing: its stacks, latest collectives, process and output. Any part may be unavailable,
# especially from a rank that hangs. Missing parts are listed with the reason.

# Maximum sizes: 64 KiB for a rank, 8 MiB for a replica group.
MAX_RANKS_IN_FULL = 128
MAX_STACKS_BYTES = 32 * 1024
MAX_FLIGHT_RECORDER_BYTES = 12 * 1024
MAX_PROCESS_BYTES = 7 * 1024
MAX_OUTPUT_BYTES = 8 * 1024
MAX_MISSING = 12
MAX_MISSING_BYTES = 240

STACKS_FILE = "lighthouse stacks"  # name of the file to which a rank writes its stacks

# Time limit for collecting a group's evidence. Ranks that have sent none by then are listed as missing.
GATHERED_WITHIN_S = 8.0


def cut_missing(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(cut_middle(reason, MAX_MISSING_BYTES) for reason in tuple(reasons)[:MAX_MISSING])


def cut_middle(text: str, max_bytes: int) -> str:
    """Shorten text to `max_bytes` of UTF-8 by replacing its middle with a note."""
    body = text.encode(errors="replace")
    if len(body) <= max_bytes:
        return body.decode()
    gap = f"\n... {len(body) - max_bytes} bytes and more are left out ...\n"
    kept = max(0, max_bytes - len(gap))
    head, tail = body[: kept // 2], body[len(body) - (kept - kept // 2) :]
    return head.decode(errors="ignore") + gap + tail.decode(errors="ignore")


Stacks = Annotated[str, Shortened(lambda text: cut_middle(text, MAX_STACKS_BYTES))]
ProcessText = Annotated[str, Shortened(lambda text: cut_middle(text, MAX_PROCESS_BYTES))]
Missing = Annotated[tuple[str, ...], Shortened(cut_missing)]


@dataclass(frozen=True, slots=True)
class RankEvidence:
    group_rank: GroupRank
    rank_incarnation: Text = ""
    pid: Count = 0
    host: Text = ""
    stacks: str = ""  # of all Python threads
    flight_recorder: str = ""  # JSON text, a list of collectives, oldest first
    process: str = ""  # lines from /proc
    output: tuple[str, ...] = ()  # last lines written
    missing: tuple[str, ...] = ()  # unavailable parts, with reasons
    took_s: Age = 0.0

    def fitted(self) -> "RankEvidence":
        """Return a copy that is shortened to fit into a message. The codec calls this method on write and read."""
        return fit_evidence(self)


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """Evidence about a rank's process, collected by another process on its host."""

    stacks: Stacks = ""
    process: ProcessText = ""
    output: Output = ()
    missing: Missing = ()
    is_stopped: bool = False  # a signal has stopped the process, so it cannot report on itself


@dataclass(frozen=True, slots=True)
class EvidenceAsked:
    """Request to a rank for evidence about itself. The rank answers with a SelfReport that carries the same number."""

    number: Count


@dataclass(frozen=True, slots=True)
class SelfReport:
    """Evidence that a rank sends about itself, in answer to the EvidenceAsked with the same number."""

    number: Count
    stacks: Stacks = ""
    flight_recorder: str = ""
    missing: Missing = ()


def fit_evidence(evidence: RankEvidence, ranks: int = 1) -> RankEvidence:
    """Shorten evidence to its maximum size in a message.

    A Flight Recorder dump that is too long is dropped and added to `missing`, because truncated JSON is invalid.

    Args:
        evidence: Evidence of one rank.
        ranks: Number of ranks in the message. Above MAX_RANKS_IN_FULL, the maximum size is reduced in proportion.
    """
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
    STALL = "stall"  # no rank made progress; fault time: the last progress
    LOSS = "loss"  # replica groups were lost; fault time: the last sign of life
    NOT_APPLIED = "not_applied"  # a group committed a step and did not apply it; fault time: its report
    DIVERGENCE = "divergence"  # a group's state differs from its peers'; fault time: its report
    NONFINITE = "nonfinite"  # a step was discarded, gradients are not finite; fault time: a group's report
    RESTART = "restart"  # a fault ended a generation of a run; fault time: its detection
    EXIT = "exit"  # a supervised process ended outside any generation
    SLOW = "slow"  # a rank computes much slower than its peers; fault time: the first slow comparison
    CHAOS = "chaos"  # `lighthouse chaos` injected a fault; fault time: the manager's report that the fault begins


_ABOUT_GROUPS = frozenset({IncidentKind.LOSS, IncidentKind.NOT_APPLIED, IncidentKind.DIVERGENCE})


@dataclass(frozen=True, slots=True)
class IncidentSummary:
    """An incident without its evidence."""

    id: str
    job: str
    kind: IncidentKind
    text: str
    suspects: tuple[str, ...]  # ranks (b/1) that were behind, or groups (b) that were lost or lack a state
    opened_unix_s: Offset  # detection, in Unix time
    noticed_s: Offset
    evidence_s: Offset | None = None
    acted_s: Offset | None = None
    action: str = ""
    quorum_s: Offset | None = None  # next quorum formed, or next generation of a run
    quorum_id: int = 0  # id of that quorum
    step_s: Offset | None = None  # first step committed after the fault
    over_s: Offset | None = None  # progress resumed, or the rank was no longer slow
    back_s: Offset | None = None  # every lost group was in a quorum again

    @property
    def groups(self) -> set[str]:
        """The groups or runs of the suspects. The name of a group that is itself a suspect may end like a rank's."""
        if self.kind in _ABOUT_GROUPS:
            return set(self.suspects)
        return {suspect.rpartition("/")[0] or suspect for suspect in self.suspects}


@dataclass(frozen=True, slots=True)
class MemberEvidence:
    replica_id: str
    rank: RankEvidence

    @property
    def name(self) -> str:
        return f"{self.replica_id}/{self.rank.group_rank}"


@dataclass(frozen=True, slots=True)
class Gathered:
    evidence: tuple[MemberEvidence, ...] = ()
    missing: tuple[str, ...] = ()  # ranks without evidence, with reasons


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


# JSON documents, for files, HTTP and --format json.


def to_document(incident: Incident) -> dict[str, Any]:
    gathered = Gathered(incident.evidence, incident.missing)
    return {**dataclasses.asdict(incident.summary), **gathered_document(gathered)}


def gathered_document(gathered: Gathered) -> dict[str, Any]:
    evidence = [{"replica_id": one.replica_id, **dataclasses.asdict(one.rank)} for one in gathered.evidence]
    return {"evidence": evidence, "missing": list(gathered.missing)}


def from_document(document: Mapping[str, Any]) -> Incident:
    """Parse a document that to_document() returned. Unknown fields are ignored.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: If the document is malformed.
    """
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
