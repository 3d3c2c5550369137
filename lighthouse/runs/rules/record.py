"""What a run's machine must not forget, and its bytes. Written on change, never per step, and before a rank is told.

Moments in here are wall-clock seconds, for people; nothing compares them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lighthouse.runs.rules.key_space import Row
from lighthouse_protocol.messages.run import Counters, Generation, RankId, Stop, Terms
from lighthouse_protocol.messages.run_status import ExcludedHost

RunName = tuple[str, str]
"""job, run"""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The newest process of a slot, as it was last heard of."""

    rank: RankId
    attempt: int
    host: str
    pid: int
    generation: int | None
    step: int
    phase: str
    is_here: bool
    seen_at: float


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """Why a generation ended. `is_fault`: not by a rank's return. `formed`: the number of the next, None until then.

    `stepped_at`: the first step after that. `evidence`: its last lines. `ends_nothing`: a process has died that
    is no rank of a generation, and none ended by it.
    """

    generation: int
    cause: str
    noticed_at: float
    is_fault: bool = True
    lost: tuple[RankId, ...] = ()
    formed: int | None = None
    formed_at: float | None = None
    stepped_at: float | None = None
    evidence: tuple[str, ...] = ()
    ends_nothing: bool = False


@dataclass(frozen=True, slots=True)
class SupervisorRecord:
    """`former`: incarnations that it has taken the place of."""

    name: str
    incarnation: str
    host: str
    slots: tuple[int, ...]
    former: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Former:
    """An earlier launch under the same run id, which was completed by generation `number`: the supervisors of it, and
    those of its ranks that have no supervisor."""

    number: int
    incarnations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`generation`: the last one formed; `is_broken`: it has ended; `finished`: the ranks that are done with it.

    `formed`: how many there were. `completed`: the number of the one that all have finished. `ending`: supervisors'
    incarnations, and the reason of the stop that each was told, and ends by.
    """

    counters: Counters = field(default_factory=Counters)
    terms: Terms = field(default_factory=Terms)
    generation: Generation | None = None
    is_broken: bool = False
    formed: int = 0
    stop: Stop | None = None
    ranks: tuple[RankRecord, ...] = ()
    incidents: tuple[RestartRecord, ...] = ()
    finished: tuple[RankId, ...] = ()
    completed: int | None = None
    supervisors: tuple[SupervisorRecord, ...] = ()
    excluded: tuple[ExcludedHost, ...] = ()
    former: Former | None = None
    ending: Mapping[str, str] = field(default_factory=dict[str, str])


def dump(record: RunRecord) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":")).encode()


def parse(raw: bytes) -> RunRecord:
    """The inverse of `dump`. Raises ValueError, TypeError or KeyError for anything else."""
    fields = json.loads(raw)
    return RunRecord(
        counters=Counters(**fields["counters"]),
        terms=Terms(**fields["terms"]),
        generation=None if fields["generation"] is None else _generation(fields["generation"]),
        is_broken=fields["is_broken"],
        formed=fields["formed"],
        stop=None if fields["stop"] is None else Stop(**fields["stop"]),
        ranks=tuple(RankRecord(**(rank | {"rank": _rank(rank["rank"])})) for rank in fields["ranks"]),
        incidents=tuple(map(_incident, fields["incidents"])),
        finished=tuple(map(_rank, fields["finished"])),
        completed=fields["completed"],
        supervisors=tuple(map(_supervisor, fields["supervisors"])),
        excluded=tuple(ExcludedHost(**excluded) for excluded in fields["excluded"]),
        former=None if fields["former"] is None else _former(fields["former"]),
        ending=dict(fields.get("ending", {})),  # none in older journals
    )


def _incident(fields: dict[str, Any]) -> RestartRecord:
    tuples: dict[str, Any] = {"lost": tuple(map(_rank, fields["lost"])), "evidence": tuple(fields["evidence"])}
    return RestartRecord(**(fields | tuples))


def _supervisor(fields: dict[str, Any]) -> SupervisorRecord:
    tuples: dict[str, Any] = {"slots": tuple(fields["slots"]), "former": tuple(fields["former"])}
    return SupervisorRecord(**(fields | tuples))


def _former(fields: Mapping[str, Any]) -> Former:
    return Former(fields["number"], tuple(fields["incarnations"]))


def _generation(fields: Mapping[str, Any]) -> Generation:
    return Generation(tuple(map(_rank, fields["active"])), Counters(**fields["counters"]))


def _rank(fields: Mapping[str, Any]) -> RankId:
    return RankId(fields["slot"], fields["incarnation"])


@dataclass(frozen=True, slots=True)
class SavedRun:
    record: RunRecord
    keys: tuple[Row, ...] = ()
