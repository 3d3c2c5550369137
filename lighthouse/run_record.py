"""What a run's machine must not forget, and its bytes. Written on change, never per step, and before anybody is told.

Moments in here are wall-clock seconds, for people; nothing compares them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from protos.generation import Counters, Generation, RankId, Stop, Terms


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
class Incident:
    """Why a generation ended. `is_fault`: not by a rank's return. `formed`: the number of the next, None until then."""

    generation: int
    cause: str
    noticed_at: float
    is_fault: bool = True
    lost: tuple[RankId, ...] = ()
    formed: int | None = None
    formed_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`generation`: the last one formed; `is_broken`: it has ended. `formed`: how many there were."""

    counters: Counters = field(default_factory=Counters)
    terms: Terms = field(default_factory=Terms)
    generation: Generation | None = None
    is_broken: bool = False
    formed: int = 0
    stop: Stop | None = None
    ranks: tuple[RankRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()


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
        incidents=tuple(
            Incident(**(incident | {"lost": tuple(map(_rank, incident["lost"]))})) for incident in fields["incidents"]
        ),
    )


def _generation(fields: Mapping[str, Any]) -> Generation:
    return Generation(tuple(map(_rank, fields["active"])), Counters(**fields["counters"]))


def _rank(fields: Mapping[str, Any]) -> RankId:
    return RankId(fields["slot"], fields["incarnation"])
