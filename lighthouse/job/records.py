"""Records of a job and its runs: stored records with their JSON format, and live records in memory.

Stored records (`QuorumRecord`, `RunRecord`) survive a restart of the lighthouse. They are written when they change,
never once per step, and before the lighthouse sends any message that depends on them. Only one lighthouse at a time
owns the store: it claims the store before it serves, and each claim has a higher term. A quorum_id names one list of
participants of one job and is never reused. So even a forgotten job keeps its highest id.

Live records (the `Group`s of a `Job`, `GenerationState`, the `Rank`s and `Supervisor`s of a run) belong to the state
machines. Their times are in seconds of the lighthouse's monotonic clock. A `RunRecord` contains copies of ranks and
supervisors. Its times are in wall-clock seconds, for display.
"""

import base64
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum, auto
from operator import attrgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import JOIN_TIMEOUT_S
from lighthouse_protocol.messages.membership import Distrust, Participant, Quorum, Tag
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.run import (
    ExcludedHost,
    Generation,
    KeyKind,
    ProcessLost,
    RankId,
    RunCounters,
    RunStopped,
    RunTerms,
    SupervisorHeartbeat,
    SupervisorHello,
)
from lighthouse_protocol.messages.session import GroupCounts
from lighthouse_protocol.rank_set import NO_RANKS
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LimitReached,
    UnknownName,
    WrongState,
)
from lighthouse_protocol.rules.heal import GroupHeal
from lighthouse_protocol.rules.stall import Limits


@dataclass(frozen=True, slots=True)
class JoinState:
    """State that a member reported in its join. The quorum may contain a lower step for it, so that it heals."""

    step: int
    tag_quorum_id: int | None
    commit_failures: int
    secret: str = field(default="", compare=False)  # digest of its manager's secret; not part of the join


@dataclass(frozen=True, slots=True)
class QuorumRecord:
    """State of a job's quorum that survives a restart of the lighthouse."""

    quorum_id: int
    """Highest id ever assigned."""
    quorum: Quorum | None = None
    """Last quorum that formed. None if only the quorum's id is known."""
    stands: bool = False
    entries: Mapping[str, JoinState] = field(default_factory=dict[str, JoinState])
    """Report of each member of `quorum` when it joined, by replica_id."""
    lease_s: float = 0.0
    """Length in seconds of the members' leases."""
    named: tuple[tuple[int, int], ...] = ()
    """Ranges (first, last) of the quorum ids under which states of this job were committed (lineage.py)."""
    branch_id: int = 0
    """Quorum with which the newest branch began (lineage.py, rule 3), or 0."""
    ended: int | None = None
    """Step at which the job ended, or None."""
    absent: tuple[str, ...] = ()
    """Groups that count as late if they join after the end (`JobEnd`)."""
    secret: str = field(default="", repr=False)
    """Secret that only the quorum's members know. A restarted lighthouse sends the same secret."""


# Stored as tables with a header row. The reader skips unknown columns and uses defaults for missing ones. Not
# stored as messages, because admitted values need no second check. `wire` keeps the bytes that arrived.
_ENTRY = tuple(f.name for f in fields(JoinState))
# `distrust` belongs to one join only.
_PARTICIPANT = tuple(f.name for f in fields(Participant) if f.name not in ("wire", "extras", "distrust"))
_get_entry = attrgetter(*_ENTRY)
_get_participant = attrgetter(*_PARTICIPANT)


def dump_quorum(record: QuorumRecord) -> bytes:
    document: dict[str, object] = {
        "quorum_id": record.quorum_id,
        "stands": record.stands,
        "lease_s": record.lease_s,
        "named": record.named,
        "branch_id": record.branch_id,
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
    """Parse the output of `dump_quorum`. Raise ValueError, TypeError or KeyError for other input."""
    document = json.loads(raw)
    entries = _rows(document["entry"], document["entries"])
    return QuorumRecord(
        quorum_id=document["quorum_id"],
        quorum=_parse_quorum(document) if "formed_id" in document else None,
        stands=document["stands"],
        entries={row.pop("replica_id"): JoinState(**_known(row, _ENTRY)) for row in entries},
        lease_s=document["lease_s"],
        named=tuple((first, last) for first, last in document["named"]),
        branch_id=document.get("branch_id", 0),
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


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """Settings for a job's quorum state machine."""

    min_replicas: int = 1
    join_timeout_s: float = JOIN_TIMEOUT_S
    heartbeat_timeout_s: float = 5.0
    deadline_margin_s: float = 1.0
    allowed_sizes: frozenset[int] = frozenset()
    active: int | None = None
    allow_heterogeneous: bool = False
    max_replicas: int = 10_000
    first_quorum_id: int = 1  # above every id that the job may have used
    lease_s: float = 5.0
    stands: bool = True  # True if standing quorums are enabled
    last_call_s: float = 0.0  # time for a lost member to return before a spare replaces it


class Verdict(StrEnum):
    """State of a job's quorum: formed, about to form, or the reason why none forms."""

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


def is_loopback(participant: Participant) -> bool | None:
    """Return whether a participant advertises a loopback address, or None if it advertises no address.

    Peers on other hosts would connect to themselves, so a loopback member and a routable one cannot share a quorum.
    Host names are not resolved here: each manager reports whether its own name resolves to a loopback address.
    """
    address, store = participant.address, participant.store_address
    if not address and not store:
        return None
    is_literal = _is_literal_loopback(address) if address else False
    return participant.resolves_to_loopback or is_literal or (bool(store) and _is_literal_loopback(store))


def loopback_error(hidden: Participant, routable: Participant) -> WrongState:
    """Return the error for the member `hidden`, whose loopback address the member `routable` cannot reach."""
    addresses = [text for text in (hidden.address, hidden.store_address) if text]
    literal = next(filter(_is_literal_loopback, addresses), None)
    is_name, place = literal is None, literal or addresses[0]
    what = f"a name that is a loopback on its own host ({place})" if is_name else f"a loopback ({place})"
    return WrongState(
        f"address: {hidden.replica_id} advertises {what} beside "
        f"{routable.replica_id} ({routable.address or routable.store_address}); its peers cannot reach it: "
        "start its manager with --advertise ADDRESS, an address of its host"
    )


@functools.lru_cache(maxsize=4096)  # a group joins with the same addresses each time
def _is_literal_loopback(text: str) -> bool:
    return parse_address(text, "address").is_loopback


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings for a run's state machine."""

    rank_timeout_s: float = 30.0
    wall_offset_s: float = 0.0  # wall clock minus monotonic clock, to display times
    beat_interval_s: float = 1.0  # between heartbeats of a supervisor
    run: str = ""  # name of the run
    limits: Limits = field(default_factory=Limits)  # time limits for ranks without progress


SPACES_KEPT = 4
MAX_KEYS = 4096
MAX_NAME_CHARS = 256
MAX_VALUE_BYTES = 4096

Row = tuple[int, KeyKind, str, bytes]
"""Generation, kind, name and value of a stored key."""


def key_text(generation: int, kind: KeyKind, name: str) -> str:
    return f"{kind}_{generation}_{name}"


class KeySpaces:
    """Small key-value store of a run, with one space per generation.

    A rank of an older generation can neither read nor write. Members of the current generation and operators can read
    earlier spaces, so that a restarted function finds its keys. To bound memory, each space has a size limit, and
    the newest SPACES_KEPT spaces with keys are kept.
    """

    def __init__(self, number: int = -1, rows: Iterable[Row] = ()) -> None:
        self.number = number
        """Number of the current generation, or -1 before the first."""
        self._spaces: dict[int, dict[tuple[KeyKind, str], bytes]] = {}
        for generation, kind, name, value in rows:
            self._spaces.setdefault(generation, {})[kind, name] = value
        self._drop_old()

    @property
    def generations(self) -> list[int]:
        return sorted(self._spaces)

    def begin_space(self, number: int) -> None:
        """Begin the key space of generation `number`. From then on, ranks of other generations have no access."""
        self.number = number
        self._spaces[number] = {}
        self._drop_old()

    def put_row(self, generation: int, kind: KeyKind, name: str, value: bytes) -> Row:
        """Set a key. The caller must store the returned row before it replies.

        Raises:
            WrongState: `generation` is not the current one.
            InvalidRequest: The name is empty, or the name or the value is too long.
            LimitReached: The generation has MAX_KEYS keys.
        """
        space = self._present_space(generation)
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed", field="key")
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidRequest(f"has {len(value)} bytes; at most {MAX_VALUE_BYTES}", field="value")
        if (kind, name) not in space and len(space) >= MAX_KEYS:
            raise LimitReached(f"key: generation {generation} has {MAX_KEYS} keys already")
        space[kind, name] = value
        return generation, kind, name, value

    def present_keys(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """Return all keys of the current generation.

        `generation` is that of the calling rank, or None for an operator. Raise WrongState if it is not current.
        """
        space = self._spaces.get(self.number, {}) if generation is None else self._present_space(generation)
        return dict(space)

    def previous_keys(self, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """Return the keys of all earlier generations with their newest values. See `present_keys` for `generation`."""
        if generation is not None:
            self._present_space(generation)
        newest: dict[tuple[KeyKind, str], bytes] = {}
        for earlier in self.generations:
            if earlier != self.number:
                newest |= self._spaces[earlier]
        return newest

    def keys_of(self, number: int, generation: int | None = None) -> dict[tuple[KeyKind, str], bytes]:
        """Return the keys of generation `number`. See `present_keys` for `generation`.

        Raise UnknownName if none are kept.
        """
        if generation is not None:
            self._present_space(generation)
        if number != self.number and number not in self._spaces:
            kept = ", ".join(map(str, self.generations)) or "none"
            raise UnknownName(f"generation: of {number} no keys are kept; generations that have keys: {kept}")
        return dict(self._spaces.get(number, {}))

    def _present_space(self, generation: int) -> dict[tuple[KeyKind, str], bytes]:
        if generation != self.number:
            now = f"generation {self.number}" if self.number >= 0 else "none yet"
            raise WrongState(f"generation: {generation} is not the current one ({now}); report ready and wait")
        return self._spaces.setdefault(generation, {})

    def _drop_old(self) -> None:
        self._spaces = {number: space for number, space in self._spaces.items() if space or number == self.number}
        for generation in self.generations[:-SPACES_KEPT]:
            del self._spaces[generation]


RunName = tuple[str, str]
"""Name of the job and name of the run."""


@dataclass(slots=True)
class Rank:
    """The newest process in a slot, with its last reports. A slot is the fixed number of a process in its run."""

    rank: RankId
    seen_at: float
    lapses_at: float = field(default=0.0, compare=False)
    attempt: int = 0
    host: str = ""
    pid: int = 0
    generation: int | None = None
    """The last generation in which this process was active."""
    step: int = 0
    phase: str = ""
    is_here: bool = True
    session: int | None = field(default=None, compare=False)
    waits_since: float | None = field(default=None, compare=False)
    """When the rank became ready. None while it is not ready."""
    secret: str = ""
    """Digest of the secret in the rank's hello. Empty if the hello had none."""
    is_successor: bool = False
    """True if another process had the slot earlier in this launch. A restarted supervisor does not report this."""
    entered_at: float = field(default=-math.inf, compare=False)
    """When the process entered the run, or minus infinity if that was before this lighthouse started."""

    @property
    def is_ready(self) -> bool:
        return self.is_here and self.waits_since is not None


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """Record of a restart: why a generation ended, and when the next one formed and completed a step."""

    generation: int
    cause: str
    noticed_at: float
    incident: str  # id of the incident; empty if a rank joined, which is not an incident
    lost: tuple[RankId, ...] = ()
    formed: int | None = None  # number of the next generation
    formed_at: float | None = None
    stepped_at: float | None = None  # first step in the next generation
    evidence: tuple[ProcessLost, ...] = ()
    ends_nothing: bool = False  # the dead process was not a rank of a generation
    caused_by: RankId | None = None  # rank whose loss is the cause


@dataclass(slots=True)
class Supervisor:
    """A supervisor of a run, with its last report. Only the newest supervisor of each name has a record."""

    entry: SupervisorHello
    """Hello of the supervisor, without the secret."""
    session: int | None = field(default=None, compare=False)
    former: tuple[str, ...] = ()
    """Incarnations of earlier supervisors with this name."""
    last: SupervisorHeartbeat = field(default_factory=SupervisorHeartbeat, compare=False)
    secret: str = ""
    """Digest of the secret in the supervisor's hello."""
    is_awaited: bool = field(default=False, compare=False)
    """True if the lighthouse has restarted and the supervisor has not reconnected."""
    refused: tuple[str, ...] = ()
    """Incarnations of this launch that requested the name and were refused, or were notified that the run is completed.
    """
    has_part: bool = False
    """True if one of the supervisor's ranks has been in a generation of this launch."""


@dataclass(frozen=True, slots=True)
class PreviousLaunch:
    """The previous launch (start by the user) of the run, whose ranks finished in generation `number`."""

    number: int
    incarnations: tuple[str, ...]  # supervisors of the launch, and its ranks without a supervisor


@dataclass(frozen=True, slots=True)
class RunRecord:
    """State of a run that survives a restart of the lighthouse. Fields with `compare=False` are not stored."""

    counters: RunCounters = field(default_factory=RunCounters)
    terms: RunTerms = field(default_factory=RunTerms)
    generation: Generation | None = None
    """The last generation that formed."""
    is_broken: bool = False
    """True if that generation has ended because a rank was lost or failed, or because the run has ended."""
    formed: int = 0
    """Number of generations that have formed."""
    stop: RunStopped | None = None
    ranks: tuple[Rank, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    finished: tuple[RankId, ...] = ()
    """Ranks that have finished the generation."""
    completed: int | None = None
    """Number of the generation that completed the run, or None."""
    supervisors: tuple[Supervisor, ...] = ()
    excluded: tuple[ExcludedHost, ...] = ()
    former: PreviousLaunch | None = None
    ending: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason of the stop that each supervisor received, by the supervisor's incarnation."""
    failed_at: tuple[float, ...] = ()
    """Times of the failures that count against the restart budget."""


def dump_run(record: RunRecord) -> bytes:
    return json.dumps(record, default=_fields, separators=(",", ":")).encode()


def _fields(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a dict without converting its fields. This is much faster than `asdict`."""
    return {name: getattr(value, name) for name in _names(type(value))}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.compare)


def parse_run(raw: bytes) -> RunRecord:
    """Parse the output of `dump_run`. Raise ValueError, TypeError or AttributeError for other input."""
    read = _reader(RunRecord)
    assert read is not None
    return read(json.loads(raw))


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that converts a JSON value to the type `hint`, or None if the value stays as it is.

    A store may contain hundreds of runs with thousands of ranks, and nothing is served until all are read. So no
    function is called for a plain value.
    """
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = [(name, read) for name in hints if (read := _reader(hints[name])) is not None]

        def read_fields(value: Any) -> Any:
            return hint(**value | {name: read(value[name]) for name, read in readers if value.get(name) is not None})

        return read_fields
    match get_origin(hint), get_args(hint):
        case origin, (item, *_) if origin is tuple:
            read_item = _reader(item)
            return tuple if read_item is None else lambda values: tuple(map(read_item, values))
        case origin, (item, *_) if origin is UnionType:
            return _reader(item)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class SavedRun:
    record: RunRecord
    keys: tuple[Row, ...] = ()


class GenerationState:
    """State of one generation: which of its active ranks are alive, still running or finished.

    A generation stands until it breaks or until a rank reports ready. It breaks when an active rank is lost or fails,
    or when all active ranks have finished. When a rank reports ready without a break, the generation is advancing: the
    next one forms when the other ranks are ready, too.
    """

    def __init__(
        self,
        generation: Generation | None = None,
        here: Iterable[RankId] = (),
        *,
        is_broken: bool = False,
        finished: Iterable[RankId] = (),
        began_at: float = -math.inf,
    ) -> None:
        """Begin a generation, or restore it with the ranks that have `finished`.

        `here` lists all live ranks, including those outside the generation. `began_at` is the time at which the
        generation began, or minus infinity if unknown.
        """
        self.generation = generation
        self.is_broken = is_broken
        self.is_advancing = False
        self.active = frozenset(generation.active) if generation else frozenset[RankId]()
        self.survivors = self.active.intersection(here)
        self.running = set(self.survivors)
        self.finished = set(finished)
        self.began_at = began_at
        self.has_stepped = False
        self.delayed_until = -math.inf  # earliest moment for the next generation
        self._taken = frozenset(rank.slot for rank in self.active)
        self.lost_units = dict.fromkeys(self._find_lost(), -math.inf)
        """Units (`is_to_restart`) that have lost an unfinished rank, with the time of the first loss."""

    @property
    def number(self) -> int:
        """Number of the generation, or -1 before the first."""
        return self.generation.number if self.generation else -1

    @property
    def is_standing(self) -> bool:
        """True while the generation is running and no rank requests the next one."""
        return self.generation is not None and not self.is_broken and not self.is_advancing

    @property
    def slots(self) -> list[int]:
        """Slots of the active ranks. The index of a slot is its rank number in this generation."""
        return [rank.slot for rank in self.generation.active] if self.generation else []

    def has_received(self, rank: RankId, generation: int | None) -> bool:
        """Return whether to accept a ready report.

        The report is outdated if the rank is active in this unbroken generation but has not received it yet.

        Args:
            rank: A rank that reports ready.
            generation: The last generation in which the rank was active, as it reports, or None.
        """
        return rank not in self.active or self.is_broken or (generation is not None and generation >= self.number)

    def is_at_work(self, rank: RankId, generation: int) -> bool:
        return generation == self.number and rank in self.running and not self.is_broken

    def can_fail(self, rank: RankId, generation: int) -> bool:
        """Return whether to accept a report that the rank has failed in `generation`. Even a ready rank may fail."""
        is_at_work = rank in self.survivors and rank not in self.finished
        return generation == self.number and is_at_work and not self.is_broken

    def is_place_taken(self, rank: RankId) -> bool:
        """Return whether another process in the rank's slot was active in the generation."""
        return rank.slot in self._taken and rank not in self.active

    def reconnect_rank(self, rank: RankId) -> None:
        """Count an active rank as running again because its process has reconnected. Ignore other ranks."""
        if rank in self.active and rank not in self.survivors:
            self.survivors |= {rank}
            lost = self._find_lost()
            self.lost_units = {unit: at for unit, at in self.lost_units.items() if unit in lost}
        self.running |= self.active & {rank}

    def mark_ready(self, rank: RankId) -> None:
        self.running.discard(rank)
        if rank in self.active and not self.is_broken:
            self.is_advancing = True

    def remove_lost(self, rank: RankId, now: float) -> bool:
        """Remove a lost rank. Return whether its loss breaks the generation."""
        self.survivors -= {rank}
        self.running.discard(rank)
        if rank not in self.active or rank in self.finished:
            return False
        self.lost_units.setdefault(rank.unit, now)
        return True

    def is_to_restart(self, rank: Rank) -> bool:
        """Return whether a live process is about to be killed, because its unit has lost a rank.

        A unit is a set of ranks that restart together. torchrun may restart a unit under the same name, so this is not
        the case for processes that entered after the loss.
        """
        lost_at = self.lost_units.get(rank.rank.unit)
        return lost_at is not None and rank.entered_at <= lost_at and not self.is_place_taken(rank.rank)

    def _find_lost(self) -> set[str]:
        return {rank.unit for rank in self.active - self.survivors - self.finished}

    def finish_rank(self, rank: RankId) -> bool:
        """Mark a rank as finished. Return whether all active ranks have finished."""
        self.finished.add(rank)
        self.is_broken = len(self.finished) == len(self.active)
        return self.is_broken


@dataclass(slots=True)
class LastAssignment:
    """Assignment of a member in its last quorum. If its next join reports no tag, `tag_of` derives one from this."""

    quorum_id: int
    max_step: int
    """Highest step among the quorum's participants."""
    tag_quorum_id: int | None
    """Quorum under which the up-to-date state at `max_step` was committed. None if the quorum lowered the member's
    step.
    """
    was_at: int | None = None
    """Step of the member's join if that exceeded `max_step`, so that the member had to heal. Otherwise None."""
    held: Tag | None = None
    """Tag of the state that the member reported in its join: (step, quorum_id under which that step was committed)."""
    lowest: int | None = None
    """Lowest `max_step` of all quorums since the first join with `held`. A group that is catching up may still receive
    the state of that step, and so may single ranks in a group whose ranks disagree.
    """
    formed_from: int | None = None
    """Quorum under which the members at `max_step` had committed their state when this quorum formed."""

    def lowest_with(self, held: Tag, max_step: int) -> int:
        """Return `lowest` for the next quorum, whose highest step is `max_step`. `held` is the tag in the new join."""
        is_another = self.held != held and held.quorum_id is not None
        return max_step if is_another or self.lowest is None else min(self.lowest, max_step)

    def has_not_healed(self, participant: Participant) -> bool:
        """Return whether the member had to heal and is still reporting its old state."""
        if self.was_at is None or self.held is None:
            return False
        return participant.step >= self.was_at and participant.tag_quorum_id == self.held.quorum_id


@dataclass(frozen=True, slots=True)
class Heal:
    """A heal: a group copies the state at step `upto`. If `catches_up`, the group runs later steps at the same time."""

    upto: int
    catches_up: bool


@dataclass(slots=True)
class GroupReports:
    """Newest reports from a group's managers. A new incarnation of the group inherits them."""

    view: GroupView | None = None
    """Newest progress view of the group's ranks."""
    view_at: float = 0.0
    heal: GroupHeal | None = None
    """Progress of the heal that the group's ranks report, or None if they are not healing."""
    preemption: PreemptionNotice | None = None
    """Notice that the group's hosts will be taken away, or None."""
    announced: PreemptionNotice | None = None
    """Last notice that was passed to `Ports.preempted`. The manager repeats a valid notice in each session."""
    preempted_at: float | None = None
    """When the hosts will be taken away, or None if unknown."""
    others_stay: bool | None = None
    """True if other groups stay, as last sent to the manager. None if nothing was sent since the last notice."""
    counts: GroupCounts | None = None
    """Totals that the group's manager has counted since it started."""
    distrust: Distrust | None = None
    """Why the group's state is invalid, according to its last join. None if the state is valid."""
    rejected_step: int | None = None
    """Step that the group's ranks report as discarded because of non-finite gradients."""
    trains_since: float | None = None
    """When `JobAccount` began to count the group's time. None before its first quorum and after it has left."""


class Kind(StrEnum):
    """Kinds of groups that `Job.counts` counts. Live groups are also counted by their group_world_size."""

    REPORTED = auto()  # has neither joined nor opened a session
    CONNECTED = auto()  # has a session
    HEALTHY = auto()
    WORKING = auto()  # healthy, and in the current quorum
    LOOPBACK = auto()
    ROUTABLE = auto()
    DRAINING = auto()  # draining, and in the current quorum


@dataclass(slots=True, eq=False)
class Group:
    """A replica group in one incarnation. Each incarnation has its own record."""

    replica_id: str
    incarnation: str
    seen_at: float
    """When the group's last message arrived. All times are from the lighthouse's monotonic clock."""
    participant: Participant | None = None
    """Description from the newest hello or join. None if the group has only sent heartbeats without a session."""
    step: int = 0
    """Newest step that the group has reported."""

    session: int | None = None
    secret: str = ""
    """Digest of the secret in the manager's hellos (identity rules in roster.py). Empty before the first hello."""
    former_secret: str = ""
    """Digest of the manager's secret in the last quorum with this group, if that is not the current quorum."""
    closes_at: float | None = None
    """When the group will be lost unless its manager reconnects. None while the session's stream is open."""
    burst: int = 0
    """Number of the last burst of closed connections (`MassSilence`) that included this group's connection."""

    call: int | None = None
    """Number of the group's pending call for a quorum, or None."""
    deadline_at: float = 0.0
    """When the pending call expires."""

    is_alive: bool = True
    lapsed_at: float = 0.0
    due_at: float = 0.0
    """When the job checks the group's timeout next."""
    excused_until: float = 0.0
    """Time until which the group counts as alive despite its silence."""
    has_missed: bool = False
    """True if the group missed a join timeout. The other groups do not wait for it until it joins."""
    down: str = ""
    """Why the group cannot take part until it joins again. Empty if it can take part."""
    is_starting: bool = False
    """True if the group's ranks have not connected yet, or are restarting."""
    missing: Set[int] = NO_RANKS
    """Ranks that are not connected."""
    drains: bool = False
    """True if the group leaves after the steps of its quorum and joins no other quorum."""

    is_participant: bool = False
    """True if the current quorum contains this incarnation of the group."""
    last_assignment: LastAssignment | None = None
    lease_until: float = 0.0
    heal: Heal | None = None
    """The heal in progress, as tracked for the timeline."""
    reports: GroupReports = field(default_factory=GroupReports)

    is_loopback: bool | None = None
    """True if only its own host can reach the group. None if it advertises no address."""
    counts_as: frozenset[Kind | int] = frozenset()
    """Kinds as which `Job.counts` counts the group."""

    @property
    def is_healthy(self) -> bool:
        """True if the other groups wait for this one before a quorum forms."""
        return Kind.HEALTHY in self.counts_as

    @property
    def is_reported(self) -> bool:
        """True if the group has only sent heartbeats, without joining or opening a session."""
        return self.participant is None

    @property
    def is_connected(self) -> bool:
        return self.session is not None and self.closes_at is None


@dataclass(slots=True)
class Lease:
    """Permission for a member to start steps until the time `until` without asking the lighthouse.

    A lease remains valid if the member's `Group` is removed.
    """

    incarnation: str
    until: float
    entry: JoinState
    """State in the member's join for this quorum, with the digest of the member's secret."""
    granted: int | None = None
    """Highest step that the member has granted, as it reported after the recall. None before that report."""
    is_spent: bool = False
    """True if the member has stopped granting steps."""
    has_left: bool = False
    """True if the member's ranks have exited cleanly."""
    is_awaited: bool = False
    """True if the current phase waits for the member."""
    has_reported: bool = True
    """True if the member has reported to this lighthouse, and not only to an earlier one."""


class Membership(Enum):
    """Whether a replica group is a member of its job's quorum, which it proves with its manager's secret."""

    MEMBER = "member"
    OUTSIDER = "outsider"  # other groups are members, and this group never received a quorum
    OPEN = "open"  # no group is a member: no quorum has formed, or all its members are lost
