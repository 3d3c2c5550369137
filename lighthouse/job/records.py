"""What a lighthouse must not forget, and the narrow interface to where it is kept. Rules:

- One lighthouse has the store at a time. It claims it before it serves, and every claim has a higher term.
- Written on change, never per step, and before it is told: what was told can be read back after any end.
- A quorum_id names one list of one job for ever. A job that has gone quiet is forgotten except for its highest id.
"""

import base64
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum, auto
from functools import lru_cache
from operator import attrgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import JOIN_TIMEOUT_S
from lighthouse_protocol.messages.membership import Participant, Quorum, Tag
from lighthouse_protocol.messages.run import (
    ExcludedHost,
    Generation,
    KeyKind,
    ProcessLost,
    RankId,
    RunCounters,
    RunStopped,
    RunTerms,
    SupervisorHello,
)
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LimitReached,
    UnknownName,
    WrongState,
)
from lighthouse_protocol.rules.stall import Limits


@dataclass(frozen=True, slots=True)
class JoinState:
    """The join that a member of the quorum came with; the step that it was assigned may differ. `secret`: the digest of
    its sessions' secret, which is no part of the join."""

    step: int
    tag_quorum_id: int | None
    commit_failures: int
    secret: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class QuorumRecord:
    """What one job's machine must not forget.

    `quorum_id` is the highest ever named, `quorum` the last one formed (None: there is none to go on with).
    `named`: ranges of the ids by which states of this job are named (lineage.py).
    `ended`, `absent`: the job's end, and the groups that come too late for it (job_end.py).
    `entries` by replica_id: what `quorum` was formed from. `lease_s` is the lease it was made under. `secret`: of the
    members of `quorum`, so that a lighthouse that has restarted tells the same.
    """

    quorum_id: int
    quorum: Quorum | None = None
    stands: bool = False
    entries: Mapping[str, JoinState] = field(default_factory=dict[str, JoinState])
    lease_s: float = 0.0
    named: tuple[tuple[int, int], ...] = ()
    ended: int | None = None
    absent: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)


# As tables, the names of the columns first: a column that the reader does not know is skipped, one that it misses has
# its default. Not as messages: nothing that was once admitted is checked again, and the bytes stay those that came.
_ENTRY = tuple(f.name for f in fields(JoinState))
# What a join said of its state (`distrust`) ends with that join.
_PARTICIPANT = tuple(f.name for f in fields(Participant) if f.name not in ("wire", "extras", "distrust"))
_get_entry = attrgetter(*_ENTRY)
_get_participant = attrgetter(*_PARTICIPANT)


def dump_quorum(record: QuorumRecord) -> bytes:
    document: dict[str, object] = {
        "quorum_id": record.quorum_id,
        "stands": record.stands,
        "lease_s": record.lease_s,
        "named": record.named,
        "ended": record.ended,
        "absent": record.absent,
        "secret": record.secret,
        "entry": ("replica_id", *_ENTRY),
        "entries": [(replica_id, *_get_entry(entry)) for replica_id, entry in record.entries.items()],
    }
    if record.quorum is not None:
        document["formed_id"] = record.quorum.quorum_id
        document["participant"] = (*_PARTICIPANT, "wire")
        document["participants"] = [
            (*_get_participant(p), base64.b64encode(p.wire).decode()) for p in record.quorum.participants
        ]
    return json.dumps(document, separators=(",", ":")).encode()


def parse_quorum(raw: bytes) -> QuorumRecord:
    """The inverse of `dump`. Raises ValueError, TypeError or KeyError for anything else."""
    document = json.loads(raw)
    entries = _rows(document["entry"], document["entries"])
    return QuorumRecord(
        quorum_id=document["quorum_id"],
        quorum=_parse_quorum(document) if "formed_id" in document else None,
        stands=document["stands"],
        entries={row.pop("replica_id"): JoinState(**_known(row, _ENTRY)) for row in entries},
        lease_s=document["lease_s"],
        named=tuple((first, last) for first, last in document["named"]),
        ended=document.get("ended"),
        absent=tuple(document.get("absent", ())),
        secret=document["secret"],
    )


def _parse_quorum(document: dict[str, Any]) -> Quorum:
    rows = _rows(document["participant"], document["participants"])
    participants = [Participant(**_known(row, _PARTICIPANT), wire=base64.b64decode(row["wire"])) for row in rows]
    return Quorum(document["formed_id"], tuple(participants))


def _rows(columns: list[str], rows: list[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _known(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


# -- config -------------------------------------------------------------------
#
# What a job's machine is told once.


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """`first_quorum_id` must be above every id that this job was ever told. `stands`: quorums may stand.

    `last_call_s`: how long a lost member may take to be back before a spare is spent in its place; 0: it is at once.
    """

    min_replicas: int = 1
    join_timeout_s: float = JOIN_TIMEOUT_S
    heartbeat_timeout_s: float = 5.0
    deadline_margin_s: float = 1.0
    allowed_sizes: frozenset[int] = frozenset()
    active: int | None = None
    allow_heterogeneous: bool = False
    max_replicas: int = 10_000
    first_quorum_id: int = 1
    lease_s: float = 5.0
    stands: bool = True
    last_call_s: float = 0.0


# -- verdict ------------------------------------------------------------------
#
# Why there is, or is not, a quorum.


class Verdict(StrEnum):
    NO_JOINS = "no_joins"
    FORMED = "formed"
    READY = "ready"
    TOO_FEW_PARTICIPANTS = "too_few_participants"
    NO_ALLOWED_SIZE = "no_allowed_size"
    WAITING_FOR_MEMBERS = "waiting_for_members"
    WAITING_FOR_STRAGGLERS = "waiting_for_stragglers"
    WAITING_FOR_RECALL = "waiting_for_recall"
    WAITING_FOR_RECONNECT = "waiting_for_reconnect"
    WAITING_FOR_LEASES = "waiting_for_leases"
    WAITING_FOR_LOST_MEMBER = "waiting_for_lost_member"


# -- reachability -------------------------------------------------------------
#
# Which members their peers can reach: the loopback rule. No look-ups: a manager reports what its own name resolves
# to.
#
# The peers of a member on a loopback would connect to themselves. Beside a member that can be reached from everywhere
# it has no place, whichever came first; among its like it is on one host with them, and welcome.


def is_loopback(participant: Participant) -> bool | None:
    """Whether it can be reached from its own host only; None for one that advertises nothing."""
    addresses = [text for text in (participant.address, participant.store_address) if text]
    if not addresses:
        return None
    return participant.resolves_to_loopback or any(map(_is_literal_loopback, addresses))


def unreachable(hidden: Participant, routable: Participant) -> WrongState:
    """Why `hidden` has no place beside `routable`."""
    return WrongState(
        f"address: {hidden.replica_id} advertises {_what_is_hidden(hidden)} beside "
        f"{routable.replica_id} ({routable.address or routable.store_address}); its peers cannot reach it: "
        "start its manager with --advertise ADDRESS, an address of its host"
    )


def _what_is_hidden(participant: Participant) -> str:
    addresses = [text for text in (participant.address, participant.store_address) if text]
    literal = next(filter(_is_literal_loopback, addresses), None)
    if literal is not None:
        return f"a loopback ({literal})"
    return f"a name that is a loopback on its own host ({addresses[0]})"


@lru_cache(maxsize=4096)  # a group joins by the same addresses again and again
def _is_literal_loopback(text: str) -> bool:
    return parse_address(text, "address").is_loopback


# -- config -------------------------------------------------------------------
#
# What a run's machine is set up with.


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`wall_offset_s` makes the wall clock of the machine's monotonic one, for the moments that people read.

    `beat_interval_s`: how often a supervisor is to beat. `run`: its name; `limits`: how long its ranks may be without a
    mark.
    """

    rank_timeout_s: float = 30.0
    wall_offset_s: float = 0.0
    beat_interval_s: float = 1.0
    run: str = ""
    limits: Limits = field(default_factory=Limits)


# -- key space ----------------------------------------------------------------
#
# A small key-value space for each generation, fenced: a rank of an older generation neither reads nor writes.
#
# Whoever is in the present generation, and a person, may read what earlier ones wrote: that is what a restarted
# function finds again. Only the newest few spaces with keys are kept, and each is limited, so memory is flat however
# often a job restarts.

SPACES_KEPT = 4
MAX_KEYS = 4096
MAX_NAME_CHARS = 256
MAX_VALUE_BYTES = 4096

Row = tuple[int, KeyKind, str, bytes]
"""generation, kind, name, value: what is written down of one key."""


def key_text(generation: int, kind: KeyKind, name: str) -> str:
    """The text form of the key."""
    return f"{kind}_{generation}_{name}"


class KeySpaces:
    def __init__(self, number: int = -1, rows: Iterable[Row] = ()) -> None:
        self.number = number
        """The present generation; -1: none yet."""
        self._spaces: dict[int, dict[tuple[KeyKind, str], bytes]] = {}
        for generation, kind, name, value in rows:
            self._spaces.setdefault(generation, {})[kind, name] = value
        self._drop_old()

    @property
    def generations(self) -> list[int]:
        return sorted(self._spaces)

    def advance(self, number: int) -> None:
        """Generation `number` has formed: all others are fenced off."""
        self.number = number
        self._spaces[number] = {}
        self._drop_old()

    def put(self, generation: int, kind: KeyKind, name: str, value: bytes) -> Row:
        """What is to be written down before it is told. Raises a refusal, and then has changed nothing."""
        space = self._fenced(generation)
        _check(name, value)
        if (kind, name) not in space and len(space) >= MAX_KEYS:
            raise LimitReached(f"key: generation {generation} has {MAX_KEYS} keys already")
        space[kind, name] = value
        return generation, kind, name, value

    def present(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """All keys of the present generation. Raises WrongState if `generation` is another one."""
        space = self._spaces.get(self.number, {}) if generation is None else self._fenced(generation)
        return dict(space)

    def previous(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """Each key's value from the newest earlier generation that set it. `generation`: as of `present`."""
        if generation is not None:
            self._fenced(generation)
        newest: dict[tuple[KeyKind, str], bytes] = {}
        for earlier in self.generations:
            if earlier != self.number:
                newest |= self._spaces[earlier]
        return newest

    def of(self, number: int, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """All keys of generation `number`. Raises UnknownName if they are not kept. `generation`: as of `present`."""
        if generation is not None:
            self._fenced(generation)
        if number != self.number and number not in self._spaces:
            kept = ", ".join(map(str, self.generations)) or "none"
            raise UnknownName(f"generation: of {number} no keys are kept; generations that have keys: {kept}")
        return dict(self._spaces.get(number, {}))

    def _fenced(self, generation: int) -> dict[tuple[KeyKind, str], bytes]:
        if generation != self.number:
            now = f"generation {self.number}" if self.number >= 0 else "none yet"
            raise WrongState(f"generation: {generation} is not the current one ({now}); report ready and wait")
        return self._spaces.setdefault(generation, {})

    def _drop_old(self) -> None:
        self._spaces = {number: space for number, space in self._spaces.items() if space or number == self.number}
        for generation in self.generations[:-SPACES_KEPT]:
            del self._spaces[generation]


def _check(name: str, value: bytes) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed", field="key")
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"has {len(value)} bytes; at most {MAX_VALUE_BYTES}", field="value")


# -- record -------------------------------------------------------------------
#
# What a run's machine must not forget, and its bytes. Written on change, never per step, and before a rank is told.
#
# Moments in here are wall-clock seconds, for people; nothing compares them.

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


def dump_run(record: RunRecord) -> bytes:
    return json.dumps(record, default=_fields, separators=(",", ":")).encode()


def _fields(value: Any) -> dict[str, Any]:
    """As asdict, of one level at a time, in a fraction of its time."""
    return {name: getattr(value, name) for name in _names(type(value))}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind))


def parse_run(raw: bytes) -> RunRecord:
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


# -- generation ---------------------------------------------------------------
#
# One generation from its forming to its end: which of its active ranks are alive, run, have finished.
#
# It stands until it is broken (an active rank was lost or failed, or all have finished), or until the first of its
# ranks says ready by itself: then it is advancing, and the others are waited for.


class GenerationState:
    def __init__(
        self,
        generation: Generation | None = None,
        here: Iterable[RankId] = (),
        *,
        is_broken: bool = False,
        finished: Iterable[RankId] = (),
    ) -> None:
        """`here`: the ranks that are alive, of this generation or not."""
        self.generation = generation
        self.is_broken = is_broken
        self.is_advancing = False
        self.active = frozenset(generation.active) if generation else frozenset[RankId]()
        self.survivors = self.active.intersection(here)
        self.running = set(self.survivors)
        self.finished = set(finished)
        self._taken = frozenset(rank.slot for rank in self.active)
        self.lost_units = self._find_lost()

    @property
    def number(self) -> int:
        """-1: there was none yet."""
        return self.generation.number if self.generation else -1

    @property
    def stands(self) -> bool:
        """It runs, and no rank wants another."""
        return self.generation is not None and not self.is_broken and not self.is_advancing

    @property
    def slots(self) -> list[int]:
        """`slots[i]` is rank i."""
        return [rank.slot for rank in self.generation.active] if self.generation else []

    def begin(self, active: tuple[RankId, ...], counters: RunCounters) -> Generation:
        generation = Generation(active, counters)
        self.__init__(generation, active)
        return generation

    def has_heard(self, rank: RankId, generation: int | None) -> bool:
        """Whether a ready rank that was last active in `generation` can have left this one, or is none of it."""
        return rank not in self.active or self.is_broken or (generation is not None and generation >= self.number)

    def runs(self, rank: RankId, generation: int) -> bool:
        return generation == self.number and rank in self.running and not self.is_broken

    def can_fail(self, rank: RankId, generation: int) -> bool:
        """Also one that has said ready may: it is waited for no more, and the others are to know."""
        is_at_work = rank in self.survivors and rank not in self.finished
        return generation == self.number and is_at_work and not self.is_broken

    def is_place_of_another(self, rank: RankId) -> bool:
        """A predecessor of this process, which has finished, is what the slot stands for in this generation."""
        return rank.slot in self._taken and rank not in self.active

    def come_back(self, rank: RankId) -> None:
        """The process lives, its connection was broken: it is waited for again."""
        if rank in self.active and rank not in self.survivors:
            self.survivors |= {rank}
            self.lost_units = self._find_lost()
        self.running |= self.active & {rank}

    def ready(self, rank: RankId) -> None:
        self.running.discard(rank)
        if rank in self.active and not self.is_broken:
            self.is_advancing = True

    def lose(self, rank: RankId) -> bool:
        """Whether that breaks it."""
        self.survivors -= {rank}
        self.running.discard(rank)
        if rank not in self.active or rank in self.finished:
            return False
        self.lost_units.add(rank.unit)
        return True

    def _find_lost(self) -> set[str]:
        """Of ranks that had not finished: what restarts with them is about to die."""
        return {rank.unit for rank in self.active - self.survivors - self.finished}

    def finish(self, rank: RankId) -> bool:
        """Whether all have finished."""
        self.finished.add(rank)
        self.is_broken = len(self.finished) == len(self.active)
        return self.is_broken


@dataclass(slots=True)
class LastQuorumTold:
    """What a member was last told: the tag of a caller that sends none is derived from it.

    `was_at`: it came with that step, which is higher, and was to heal. `held`: the state that it came with; `lowest`:
    the lowest max_step that it was told since it first came with that one. A group that catches up may come to hold it,
    and where its ranks hold different states, which no tag names, any one of them may, whatever the others have done.
    `formed_from`: the quorum under which the state was committed that its members at max_step held.
    """

    quorum_id: int
    max_step: int
    tag_quorum_id: int | None
    was_at: int | None = None
    held: Tag | None = None
    lowest: int | None = None
    formed_from: int | None = None

    def lowest_with(self, held: Tag, max_step: int) -> int:
        """With the quorum that it is told now."""
        is_another = self.held != held and held.quorum_id is not None
        return max_step if is_another or self.lowest is None else min(self.lowest, max_step)

    def has_not_healed(self, participant: Participant) -> bool:
        """It was to heal, and comes with the state that it had before."""
        if self.was_at is None or self.held is None:
            return False
        return participant.step >= self.was_at and participant.tag_quorum_id == self.held.quorum_id


@dataclass(frozen=True, slots=True)
class Heal:
    """A group heals to step `upto`, and takes part in later steps meanwhile if it catches up."""

    upto: int
    catches_up: bool


class Kind(Enum):
    """What groups are counted by. Besides, living ones are counted by their group_world_size."""

    REPORTED = auto()  # has neither joined nor opened a session
    CONNECTED = auto()  # has a session
    HEALTHY = auto()
    WORKING = auto()  # healthy, and in the present quorum
    LOOPBACK = auto()
    ROUTABLE = auto()
    DRAINING = auto()  # drains, and is in the present quorum


@dataclass(slots=True, eq=False)
class Group:
    """A replica group, as long as it has the same incarnation. Another incarnation gets another record."""

    replica_id: str
    incarnation: str
    seen_at: float
    """Last message. Moments are the lighthouse's monotonic clock."""
    participant: Participant | None = None
    """From the newest hello or join. None after heartbeats without a session: see `is_reported`."""
    step: int = 0
    """Newest step that the group has reported."""

    session: int | None = None
    secret: str = ""
    """Digest of the secret of the group's sessions (identity, in roster.py). Empty before the first session."""
    closes_at: float | None = None
    """The session's stream has ended. The group is lost at this moment, unless its manager reconnects."""
    burst: int = 0
    """The last burst of closings (silence, in presence.py) that included the group's."""

    call: int | None = None
    """The waiting join."""
    deadline_at: float = 0.0
    """When the waiting join expires."""

    is_alive: bool = True
    lapsed_at: float = 0.0
    due_at: float = 0.0
    """When the roster examines the group again."""
    excused_until: float = 0.0
    """The group lapses at this moment at the earliest."""
    has_missed: bool = False
    """Missed a join_timeout. The others do not wait for the group until it joins."""
    down: str = ""
    """Why the group cannot take part until it joins. Empty if it can."""
    is_starting: bool = False
    """Its ranks have not connected yet, or are restarting."""
    missing: Set[int] = NO_RANKS
    """Ranks that are not connected."""
    drains: bool = False
    """Does the steps of its quorum, and wants to be in no other."""

    is_participant: bool = False
    """The present quorum contains this incarnation."""
    last_told: LastQuorumTold | None = None
    lease_until: float = 0.0
    heal: Heal | None = None
    """The heal that the timeline has noted and not seen the end of."""

    is_loopback: bool | None = None
    """Whether only its own host can reach the group. None if it advertises no address."""
    counts_as: frozenset[Kind | int] = frozenset()
    """See `Job.counts`."""

    @property
    def is_healthy(self) -> bool:
        """The others wait for the group."""
        return Kind.HEALTHY in self.counts_as

    @property
    def is_reported(self) -> bool:
        """The group has neither joined nor opened a session."""
        return self.participant is None

    @property
    def is_connected(self) -> bool:
        return self.session is not None and self.closes_at is None


# -- job ----------------------------------------------------------------------
#
# The replica groups of a job, and its present quorum: the last one that this lighthouse or an earlier one has formed.


class Job:
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        """By replica_id. Lapsed groups stay for a while."""
        self.counts = Counter[Kind | int]()
        """How many groups there are of each kind, as far as there are any."""
        self.quorum: Quorum | None = None
        self.participants: dict[str, Participant] = {}
        """Of the quorum, by replica_id."""
        self.max_step = 0
        """At which the quorum was formed."""
        self.formed_at: float | None = None
        """When the quorum_id changed last. A quorum of an earlier lighthouse counts from this one's first event."""
        self.rounds = 0
        """Quorums that this lighthouse has formed."""
        self.changes = 0
        """How many of them got a new quorum_id."""
        self._tags: set[int | None] = set()  # of the states that the quorum was formed from, and that it makes
        self._secrets: dict[str, str] = {}  # digests by replica_id: of participants, and of former ones with a record

    @property
    def replica_ids(self) -> Set[str]:
        """Participants of the quorum."""
        return self.participants.keys()

    def count(self, group: Group, kinds: frozenset[Kind | int]) -> None:
        """Count the group as these kinds, and as no other."""
        for kind in group.counts_as - kinds:
            self.counts[kind] -= 1
            if not self.counts[kind]:
                del self.counts[kind]
        self.counts.update(kinds - group.counts_as)
        group.counts_as = kinds

    def others(self, replica_id: str, kind: Kind | int) -> list[Group]:
        """List the other groups of a kind, sorted. O(1) if there are none, else O(n)."""
        own = self.groups.get(replica_id)
        if self.counts[kind] == (own is not None and kind in own.counts_as):
            return []
        found = [group for group in self.groups.values() if kind in group.counts_as and group is not own]
        return sorted(found, key=attrgetter("replica_id"))

    def restore(self, quorum: Quorum) -> None:
        """Continue with the last quorum of an earlier lighthouse."""
        self._set(quorum)

    def form(self, quorum: Quorum, members: Sequence[Group], now: float, *, is_new: bool) -> None:
        """Continue with a quorum that has just formed. O(n).

        Args:
            quorum: The quorum.
            members: The records of its participants, in the same order.
            now: The present moment.
            is_new: Whether its quorum_id is.
        """
        for group in self.groups.values():
            group.is_participant = False
        for member in members:
            member.is_participant = True
        former = {name: secret for name, secret in self._secrets.items() if name in self.groups}
        self._secrets = former | {member.replica_id: member.secret for member in members}
        self._set(quorum)
        self.rounds += 1
        if is_new:
            self.changes += 1
            self.formed_at = now

    def pass_time(self, now: float) -> None:
        if self.formed_at is None and self.quorum is not None:
            self.formed_at = now

    def _set(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self.participants = {member.replica_id: member for member in quorum.participants}
        self.max_step = max(member.step for member in quorum.participants)
        sources = (member for member in quorum.participants if member.step == self.max_step)
        self._tags = {quorum.quorum_id, *(source.tag_quorum_id for source in sources)}

    def may_hold(self, replica_id: str, tag: int) -> bool:
        """Whether the ranks of that group may hold a state of that tag by this quorum, also under another manager: they
        have committed it under the quorum, or the quorum was formed from it."""
        return tag in self._tags and replica_id in self.participants

    def secret_of(self, replica_id: str) -> str:
        """Return the digest that the group's manager had in the group's last quorum, or "" if there was none."""
        return self._secrets.get(replica_id, "")

    def forget(self, replica_id: str) -> None:
        """Drop what is kept of former participants, if the group is one."""
        if replica_id not in self.participants:
            self._secrets.pop(replica_id, None)

    def assigned_before(self, replica_id: str, incarnation: str) -> LastQuorumTold | None:
        """Return what an earlier lighthouse has assigned to a participant of the present quorum."""
        member = self.participants.get(replica_id) if self.rounds == 0 else None
        if self.quorum is None or member is None or member.incarnation != incarnation:
            return None
        return LastQuorumTold(self.quorum.quorum_id, self.max_step, None, lowest=0)

    def consists_of(self, members: Sequence[Group]) -> bool:
        """Whether this lighthouse formed the quorum from the same members at the same addresses."""
        participants = self.quorum.participants if self.quorum is not None and self.rounds else ()
        return len(members) == len(participants) and all(
            member.is_participant
            and member.participant is not None
            and member.participant.identity == participant.identity
            for member, participant in zip(members, participants, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Remembered:
    """A member of the quorum that stands or stood: its incarnation, and the digest of its secret. `is_awaited`: the
    lighthouse has restarted, and it has not come back."""

    incarnation: str
    secret: str
    is_awaited: bool = False


class Membership(Enum):
    """Of a replica group in the quorum of its job, as far as a secret shows."""

    MEMBER = "member"
    OUTSIDER = "outsider"  # others are members, and this one has never been told a quorum
    OPEN = "open"  # nobody is: none was formed, or all that were in it are gone


@dataclass(slots=True, eq=False)
class Rank:
    """`generation`: the last one in which this process was active. `waits_since`: None unless it is ready. `secret`:
    the digest of what its hello has shown; empty: nothing. `is_successor`: of another process that had this slot, which
    its supervisor need not know of: that may have been started again, too."""

    rank: RankId
    seen_at: float
    lapses_at: float
    attempt: int = 0
    host: str = ""
    pid: int = 0
    generation: int | None = None
    step: int = 0
    phase: str = ""
    is_here: bool = True
    session: int | None = None
    waits_since: float | None = None
    secret: str = ""
    is_successor: bool = False

    @property
    def is_ready(self) -> bool:
        return self.is_here and self.waits_since is not None
