"""What a run's machine must not forget, and its bytes. Written on change, never per step, and before a rank is told.

Moments in here are wall-clock seconds, for people; nothing compares them.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lighthouse.runs.rules.key_space import Row
from lighthouse_protocol.messages.run import Generation, RankId, RunCounters, RunStopped, RunTerms
from lighthouse_protocol.messages.run_status import ExcludedHost
from lighthouse_protocol.messages.supervisor import ProcessLost, SupervisorHello

RunName = tuple[str, str]
"""job, run"""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The newest process of a slot, as it was last heard of. `secret`: the digest of what it shows. `is_successor`:
    another process had the slot in this launch, before."""

    rank: RankId
    attempt: int
    host: str
    pid: int
    generation: int | None
    step: int
    phase: str
    is_here: bool
    seen_at: float
    secret: str = ""
    is_successor: bool = False


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """Why a generation ended. `incident`: the id of the incident; empty: a rank came back, which is none.

    `formed`: the number of the next generation, None until it forms. `stepped_at`: the first step after that.
    `ends_nothing`: a process died that is no rank of a generation, so no generation ended.
    """

    generation: int
    cause: str
    noticed_at: float
    incident: str
    lost: tuple[RankId, ...] = ()
    formed: int | None = None
    formed_at: float | None = None
    stepped_at: float | None = None
    evidence: tuple[ProcessLost, ...] = ()
    ends_nothing: bool = False


@dataclass(frozen=True, slots=True)
class SupervisorRecord:
    """`hello` without its secret; `former`: incarnations that it has taken the place of, `refused`: that have asked for
    its name meanwhile; `secret`: the digest of what it shows; `has_part`: a rank of it has been in a generation."""

    hello: SupervisorHello
    former: tuple[str, ...] = ()
    secret: str = ""
    refused: tuple[str, ...] = ()
    has_part: bool = False


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
    incarnations, and the reason of the stop that each was told, and ends by. `failed_at`: when the function failed, as
    far as the budget of restarts counts it.
    """

    counters: RunCounters = field(default_factory=RunCounters)
    terms: RunTerms = field(default_factory=RunTerms)
    generation: Generation | None = None
    is_broken: bool = False
    formed: int = 0
    stop: RunStopped | None = None
    ranks: tuple[RankRecord, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    finished: tuple[RankId, ...] = ()
    completed: int | None = None
    supervisors: tuple[SupervisorRecord, ...] = ()
    excluded: tuple[ExcludedHost, ...] = ()
    former: Former | None = None
    ending: Mapping[str, str] = field(default_factory=dict[str, str])
    failed_at: tuple[float, ...] = ()


def dump(record: RunRecord) -> bytes:
    return json.dumps(record, default=_fields, separators=(",", ":")).encode()


def _fields(value: Any) -> dict[str, Any]:
    """As asdict, of one level at a time, in a fraction of its time."""
    return {name: getattr(value, name) for name in _names(type(value))}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind))


def parse(raw: bytes) -> RunRecord:
    """The inverse of `dump`. Raises ValueError, TypeError or AttributeError for anything else."""
    return _read(RunRecord, json.loads(raw))


def _read(hint: Any, value: Any) -> Any:
    """`value` of a JSON document, as `hint` says."""
    if value is None:
        return None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{name: _read(hints.get(name), field) for name, field in value.items()})
    match get_origin(hint), get_args(hint):
        case origin, (item, *_) if origin is tuple:
            return tuple([_read(item, each) for each in value])
        case origin, (item, *_) if origin is UnionType:
            return _read(item, value)
        case _:
            return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True, slots=True)
class SavedRun:
    record: RunRecord
    keys: tuple[Row, ...] = ()
