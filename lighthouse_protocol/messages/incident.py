"""An incident: training stood still, replica groups were lost, or one holds no state any more. What happened when, and
what ranks did. No protobuf.

All offsets are seconds since the fault, by one clock of the lighthouse; None: that has not happened.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lighthouse_protocol.constraints import Offset
from lighthouse_protocol.messages.evidence import RankEvidence


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
