"""Records of jobs and runs in etcd, written by the leader.

- The leader is the only writer. It reads all records into memory when it becomes the leader.
- A change takes effect in memory at once and is queued for etcd in order. The lighthouse's later answers wait (`hold`)
  until etcd has acknowledged the change, so the next leader finds everything on which earlier answers depended.
- Changes are written in batches, one at a time; a batch is repeated unchanged until it is known to be written. A batch
  is one transaction. Its guards are the revision at which the leader's key was created and the key's version, which
  each batch increments. So a deposed leader cannot write, and a repeated batch takes effect once.
- A record that does not fit in one request is written in parts under new keys, before its own key refers to them. Only
  then are the previous parts deleted, so the latest acknowledged record is always readable.
"""

import hashlib
import logging
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from lighthouse.job import records as job_records
from lighthouse.job.records import QuorumRecord, Row, RunName, RunRecord, SavedRun
from lighthouse.job.store import FINISHED_RUNS_KEPT, FORGOTTEN_JOBS, RUNS_KEPT
from lighthouse.store import etcd_client as etcd
from lighthouse.store.etcd_client import Json, KeyValue
from lighthouse_protocol.limits import MAX_QUORUM_ID
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import NotLeader, WrongState
from lighthouse_runtime.log_event import event

log = logging.getLogger(__name__)


# -- keys, below one prefix
#
#     leader                                  the leader; bound to its lease
#     term                                    number of times that the leader's key was claimed
#     format                                  version of the other keys and values
#     forgotten                               highest quorum id of all jobs without a key
#     job/JOB                                 the job's record; for a forgotten job only its last id
#     run/JOB/RUN                             the run's record
#     key/JOB/RUN/GENERATION/KIND/NAME        one key of a run
#     job/JOB/part/SET/N                      part N of a record above RECORD_BYTES, likewise for runs
#
# Names are percent-encoded. Records are compressed, because etcd accepts at most 1.5 MiB in one request. If a record is
# written in parts, its own key names the set of parts.

FORMAT = 1
RECORD_BYTES = 512 * 1024
_GENERATION_DIGITS = 16
_IN_PARTS = b"parts "  # a compressed record starts with another byte


class Damaged(WrongState):
    def __init__(self, key: bytes, what: str) -> None:
        super().__init__(
            f"--store: {key.decode(errors='replace')!r} in etcd {what}; name another prefix, and keep this one: a job "
            "then waits one lease"
        )


@dataclass(frozen=True, slots=True)
class Keys:
    prefix: str

    @property
    def all(self) -> bytes:
        """The prefix of all keys."""
        return f"{self.prefix}/".encode()

    @property
    def leader(self) -> bytes:
        return self._of("leader")

    @property
    def term(self) -> bytes:
        return self._of("term")

    @property
    def format(self) -> bytes:
        return self._of("format")

    @property
    def forgotten(self) -> bytes:
        return self._of("forgotten")

    def job(self, job: str) -> bytes:
        return self._of("job", job)

    def run(self, name: RunName) -> bytes:
        return self._of("run", *name)

    def run_keys(self, name: RunName) -> bytes:
        """Return the prefix under which all keys of a run are stored."""
        return self._of("key", *name) + b"/"

    def run_keys_from(self, name: RunName, generation: int) -> bytes:
        """Return the prefix of a run's keys in `generation`. The keys of a run sort by generation."""
        return self.run_keys(name) + _number(generation).encode() + b"/"

    def run_key(self, run: RunName, row: Row) -> bytes:
        generation, kind, name, _ = row
        return self._of("key", *run, _number(generation), kind.value, name)

    def _of(self, *parts: str) -> bytes:
        return "/".join((self.prefix, *(quote(part, safe="") for part in parts))).encode()

    def parts(self, key: bytes) -> list[str]:
        """Split a key into its unquoted parts, without the prefix. Return an empty list if it is not one of ours."""
        parts = [unquote(part) for part in key.decode(errors="replace").removeprefix(f"{self.prefix}/").split("/")]
        return parts if self._of(*parts) == key else []


def _number(generation: int) -> str:
    """Format a number with leading zeros, so that keys sort by number."""
    return f"{generation:0{_GENERATION_DIGITS}d}"


def parse_run_key(key: bytes, parts: list[str], value: bytes) -> tuple[RunName, Row]:
    try:
        _, job, run, generation, kind, name = parts
        return (job, run), (int(generation), KeyKind(kind), name, value)
    except ValueError as e:
        raise Damaged(key, f"is not read: {e}") from e


def parts_of(record: bytes, name: str = "") -> bytes:
    """Return the prefix of a record's parts in the set `name`, or in all sets if `name` is empty."""
    return record + b"/part/" + (f"{name}/".encode() if name else b"")


def split(record: bytes, raw: bytes) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Split a record that is too long for one request into parts.

    Returns:
        The name of the set of parts, and the (key, value) pairs to write in this order. The last one is the record's
        own key, which refers to the set.
    """
    name = hashlib.sha256(raw).hexdigest()[:16]
    pieces = [raw[start : start + RECORD_BYTES] for start in range(0, len(raw), RECORD_BYTES)]
    rows = [(parts_of(record, name) + _number(n).encode(), piece) for n, piece in enumerate(pieces)]
    return name, [*rows, (record, _IN_PARTS + name.encode())]


def join(record: bytes, raw: bytes, sets: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return the whole record.

    Args:
        record: Key of the record.
        raw: Value of that key: the record, or the name of a set of parts.
        sets: All parts of the record in etcd, by the name of their set.

    Raises:
        Damaged: If a part is missing.
    """
    if not raw.startswith(_IN_PARTS):
        return raw
    name = raw.removeprefix(_IN_PARTS).decode(errors="replace")
    whole = b"".join(sets.get(name, ()))
    if hashlib.sha256(whole).hexdigest()[:16] != name:
        raise Damaged(record, f"is not read: its parts {name!r} are not all there")
    return whole


def dump_job(record: QuorumRecord) -> bytes:
    return zlib.compress(job_records.dump_quorum(record))


def parse_job(key: bytes, raw: bytes) -> QuorumRecord:
    try:
        return job_records.parse_quorum(zlib.decompress(raw))
    except (ValueError, TypeError, KeyError, zlib.error) as e:
        raise Damaged(key, f"is not read: {e!r}") from e


def dump_run(record: RunRecord) -> bytes:
    return zlib.compress(job_records.dump_run(record))


def parse_run(key: bytes, raw: bytes) -> RunRecord:
    try:
        return job_records.parse_run(zlib.decompress(raw))
    except (ValueError, TypeError, AttributeError, zlib.error) as e:
        raise Damaged(key, f"is not read: {e!r}") from e


def parse_number(key: bytes, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as e:
        raise Damaged(key, f"is no number: {raw[:40]!r}") from e


def check_format(key: bytes, raw: bytes) -> None:
    if (found := parse_number(key, raw)) != FORMAT:
        raise Damaged(key, f"says format {found}, and this lighthouse knows {FORMAT}: start the one that wrote it")


# By default etcd takes 128 operations and 1.5 MiB in one transaction; a single record may need all of that.
BATCH_OPERATIONS = 100
BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of `key`, or of the keys from `key` up to but excluding `end`."""

    key: bytes
    end: bytes | None = None


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes to write in one transaction."""

    revision: int  # revision at which the leader's key was created
    version: int  # version of the leader's key before this batch
    changes: tuple[Change, ...]


class EtcdStore:
    """The leader's records in memory, and its queue of changes to write to etcd. Implements RecordStore.

    Args:
        prefix: Prefix of all keys.
        wake: Called when changes are queued.
        hold: Blocks the lighthouse's later output. Returns a function that releases it.
    """

    def __init__(self, prefix: str, wake: Callable[[], None], hold: Callable[[], Callable[[], None]]) -> None:
        self.keys = Keys(prefix)
        self.term = 0
        self._wake = wake
        self._hold = hold
        self._revision = 0
        self._version = 0
        self._jobs: dict[str, QuorumRecord] = {}
        self._forgotten_id = 0
        self._sets: dict[bytes, set[str]] = {}  # names of the sets of parts in etcd, by the record's key
        self._runs: dict[RunName, SavedRun] = {}
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()
        self._batch: Batch | None = None
        self._is_leading = False

    def take(self, found: Iterable[KeyValue]) -> None:
        """Replace the records in memory with the given content of etcd.

        Raises:
            Damaged: If a record cannot be parsed.
        """
        self._jobs, self._runs, self._forgotten_id = {}, {}, 0
        rows: dict[RunName, list[Row]] = {}
        records: list[tuple[KeyValue, list[str]]] = []
        sets: defaultdict[bytes, defaultdict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        strangers: list[bytes] = []
        for kv in sorted(found, key=lambda kv: kv.key):
            match parts := self.keys.parts(kv.key):
                case ["forgotten"]:
                    self._forgotten_id = parse_number(kv.key, kv.value)
                case ["job", _] | ["run", _, _]:
                    records.append((kv, parts))
                case ["job", _, "part", name, _] | ["run", _, _, "part", name, _]:
                    sets[kv.key.rpartition(b"/part/")[0]][name].append(kv.value)
                case ["key", _, _, _, _, _]:
                    run, row = parse_run_key(kv.key, parts, kv.value)
                    rows.setdefault(run, []).append(row)
                case ["leader"] | ["term"] | ["format"]:
                    pass
                case _:
                    strangers.append(kv.key)
        for kv, parts in sorted(records, key=lambda record: record[0].mod_revision):
            raw = join(kv.key, kv.value, sets[kv.key])
            match parts:
                case ["job", job]:
                    record = parse_job(kv.key, raw)
                    if record.quorum_id >= MAX_QUORUM_ID:
                        raise Damaged(kv.key, f"has no id left after {record.quorum_id}")
                    self._jobs[job] = record
                case [_, job, run]:
                    self._runs[job, run] = SavedRun(parse_run(kv.key, raw))
                case _:
                    raise AssertionError(parts)
        for name, found_rows in rows.items():
            if name in self._runs:
                self._runs[name] = replace(self._runs[name], keys=tuple(found_rows))
        self._sets = {key: set(names) for key, names in sets.items() if names}
        if strangers:
            log.warning(
                "--store: ignoring %r and %d other keys below %s/, which no lighthouse of this version has written",
                strangers[0],
                len(strangers) - 1,
                self.keys.prefix,
                extra=event("store_foreign_keys", keys=len(strangers)),
            )

    def begin(self, term: int, revision: int) -> None:
        """Start accepting changes. This process created the leader's key at `revision`, which guards every write."""
        self.term, self._revision, self._version = term, revision, 1
        self._is_leading = True

    def end(self) -> None:
        """Stop accepting changes and discard those not yet written."""
        self._is_leading = False
        self._changes.clear()
        self._batch = None

    def load(self) -> Mapping[str, QuorumRecord]:
        return dict(self._jobs)

    def last_id(self, job: str) -> int:
        record = self._jobs.get(job)
        return self._forgotten_id if record is None else record.quorum_id

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Store a job's record.

        Raises:
            ValueError: If its quorum id is lower than the job's last one.
            NotLeader: If this lighthouse is not the leader.
        """
        self._check()
        last = self._jobs.get(job)
        if last is not None and record.quorum_id < last.quorum_id:
            raise ValueError(f"{job} named quorum {last.quorum_id}; its ids must not go back to {record.quorum_id}")
        self._put_job(job, record)
        self._wake()

    def forget(self, job: str) -> None:
        self._check()
        last = self._jobs.get(job)
        if last is not None:
            self._put_job(job, QuorumRecord(last.quorum_id))
            self._thin_out_jobs()
            self._wake()

    def _put_job(self, job: str, record: QuorumRecord) -> None:
        self._jobs.pop(job, None)  # keeps the dict in the order of the last change
        self._jobs[job] = record
        self._put(self.keys.job(job), dump_job(record))

    def _thin_out_jobs(self) -> None:
        forgotten = [job for job, record in self._jobs.items() if record.quorum is None]
        old = forgotten[: max(0, len(forgotten) - FORGOTTEN_JOBS)]
        if old:
            self._forgotten_id = max(self._forgotten_id, *(self._jobs[job].quorum_id for job in old))
            self._change(Put(self.keys.forgotten, str(self._forgotten_id).encode()))  # before their keys are deleted
        for job in old:
            del self._jobs[job]
            self._delete(self.keys.job(job))

    def load_run(self, name: RunName) -> SavedRun | None:
        return self._runs.get(name)

    def run_names(self, newest: int) -> Sequence[RunName]:
        return list(self._runs)[-newest:] if newest >= 0 else list(self._runs)

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        self._check()
        old = self._runs.pop(name, None)
        kept = old.keys if old is not None else ()
        self._runs[name] = SavedRun(record, tuple(row for row in kept if row[0] >= keys_from))
        self._put(self.keys.run(name), dump_run(record))
        if len(self._runs[name].keys) < len(kept):
            self._change(Delete(self.keys.run_keys(name), self.keys.run_keys_from(name, keys_from)))
        if old is None:
            self._thin_out_runs()
        self._wake()

    def commit_key(self, name: RunName, row: Row) -> None:
        self._check()
        saved = self._runs[name]
        self._runs[name] = replace(saved, keys=(*(old for old in saved.keys if old[:3] != row[:3]), row))
        self._change(Put(self.keys.run_key(name, row), row[3]))
        self._wake()

    def _thin_out_runs(self) -> None:
        finished = [name for name, saved in self._runs.items() if _is_finished(saved.record)]
        old = finished[: max(0, len(finished) - FINISHED_RUNS_KEPT)]
        rest = [name for name in self._runs if name not in old]
        for name in (*old, *rest[: max(0, len(rest) - RUNS_KEPT)]):
            del self._runs[name]
            self._delete(self.keys.run(name))
            keys_of_run = self.keys.run_keys(name)
            self._change(Delete(keys_of_run, etcd.after_prefix(keys_of_run)))

    @property
    def is_written(self) -> bool:
        return self._batch is None and not self._changes

    def next_batch(self) -> Batch | None:
        """Return the batch to write, or None if nothing is queued. It stays the same until written() is called."""
        if self._batch is None and self._changes:
            self._batch = Batch(self._revision, self._version, tuple(self._next_changes()))
        return self._batch

    def written(self) -> None:
        """Remove the current batch from the queue and release the output that waits for it."""
        assert self._batch is not None
        releases = [self._changes.popleft()[1] for _ in self._batch.changes]
        self._batch = None
        self._version += 1
        for release in releases:
            release()

    def _next_changes(self) -> Iterable[Change]:
        """Yield the changes of the next batch.

        etcd rejects a transaction that changes a key twice, so the deletion of a range is a batch of its own.
        """
        seen: set[bytes] = set()
        size = 0
        for change, _ in self._changes:
            is_range = isinstance(change, Delete) and change.end is not None
            size += len(change.value) if isinstance(change, Put) else 0
            is_full = len(seen) >= BATCH_OPERATIONS or size > BATCH_BYTES
            if seen and (is_range or is_full or change.key in seen):
                return
            yield change
            if is_range:
                return
            seen.add(change.key)

    def _put(self, key: bytes, raw: bytes) -> None:
        old = self._sets.pop(key, set())
        rows = [(key, raw)]
        if len(raw) > RECORD_BYTES:
            name, rows = split(key, raw)
            self._sets[key] = {name}
        for row in rows:
            self._change(Put(*row))
        self._delete_parts(key, old - self._sets.get(key, set()))

    def _delete(self, key: bytes) -> None:
        self._change(Delete(key))
        self._delete_parts(key, self._sets.pop(key, set()))

    def _delete_parts(self, key: bytes, names: Iterable[str]) -> None:
        for name in sorted(names):
            parts = parts_of(key, name)
            self._change(Delete(parts, etcd.after_prefix(parts)))

    def _change(self, change: Change) -> None:
        self._changes.append((change, self._hold()))

    def _check(self) -> None:
        if not self._is_leading:
            raise NotLeader("this lighthouse does not lead, so it writes nothing")


def _is_finished(record: RunRecord) -> bool:
    return record.completed is not None or record.stop is not None


# -- batches as transactions


def guards(keys_: Keys, batch: Batch) -> list[Json]:
    return [etcd.was_made_at(keys_.leader, batch.revision), etcd.has_version(keys_.leader, batch.version)]


def operations(keys_: Keys, batch: Batch) -> list[Json]:
    return [etcd.touch(keys_.leader), *map(_operation, batch.changes)]


def _operation(change: Change) -> Json:
    match change:
        case Put(key, value):
            return etcd.put(key, value)
        case Delete(key, end):
            return etcd.delete(key, end)


def was_written(batch: Batch, leader: KeyValue | None) -> bool:
    """Return whether an earlier attempt has already written the batch, so that its guards no longer match.

    Args:
        batch: The batch whose transaction was rejected.
        leader: The leader's key as now in etcd.
    """
    return leader is not None and leader.create_revision == batch.revision and leader.version == batch.version + 1
