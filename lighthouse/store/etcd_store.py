"""Records of jobs and runs in etcd, written by the leader.

- The leader is the only writer. It reads all records into memory when it becomes the leader.
- A change takes effect in memory at once and is queued for etcd in order. Later answers wait (`hold`) for etcd to
  acknowledge the change, so the next leader finds everything on which earlier answers depended.
- Changes are written in batches, one at a time; a batch is retried unchanged until it is known to be written. A batch
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
from dataclasses import dataclass

from lighthouse.store import etcd_client as etcd
from lighthouse.store.etcd_client import Json, KeyValue
from lighthouse.store.records import Change, Delete, Keys, Put, Records, after_prefix, padded
from lighthouse_protocol.refusals import NotLeader, WrongState
from lighthouse_runtime.log_event import event

log = logging.getLogger(__name__)

# etcd also has these keys below the prefix:
#
#     leader                     the leader; bound to its lease
#     term                       number of times that the leader's key was claimed
#     format                     version of the other keys and values
#     job/JOB/part/SET/N         part N of a record above RECORD_BYTES, likewise for runs
#
# Rows are compressed, because etcd accepts at most 1.5 MiB in one request. If a record is written in parts, its own key
# names the set of parts.

FORMAT = 1
RECORD_BYTES = 512 * 1024
_IN_PARTS = b"parts "  # a compressed record starts with another byte


class EtcdKeys(Keys):
    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.leader = self._key("leader")
        self.format = self._key("format")


class DamagedRecord(WrongState):
    def __init__(self, key: bytes, what: str) -> None:
        super().__init__(
            f"--store: {key.decode(errors='replace')!r} in etcd {what}; name another prefix, and keep this one: a job "
            "then waits one lease"
        )


def parts_of(record: bytes, name: str) -> bytes:
    """Return the key prefix of the parts of a record.

    `record` is the record's key, and `name` the name of the set of parts, as returned by `split`.
    """
    return record + f"/part/{name}/".encode()


def split(record: bytes, raw: bytes) -> tuple[str, list[Put]]:
    """Split a record that is too long for one request into parts.

    Args:
        record: Key of the record.
        raw: Compressed value of the record.

    Returns:
        The name of the set of parts, and the rows to write, in order. The last row has the record's own key, and its
        value refers to the set.
    """
    name = hashlib.sha256(raw).hexdigest()[:16]
    pieces = [raw[start : start + RECORD_BYTES] for start in range(0, len(raw), RECORD_BYTES)]
    rows = [Put(parts_of(record, name) + padded(n).encode(), piece) for n, piece in enumerate(pieces)]
    return name, [*rows, Put(record, _IN_PARTS + name.encode())]


def read_row(key: bytes, raw: bytes, sets: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return the whole value of a row, decompressed.

    Args:
        key: Key of the row.
        raw: Value in etcd. It is either the row's own value, or the name of a set of parts.
        sets: All parts of the row in etcd, by the name of their set.

    Raises:
        DamagedRecord: If a part is missing, or the value cannot be decompressed.
    """
    if raw.startswith(_IN_PARTS):
        name = raw.removeprefix(_IN_PARTS).decode(errors="replace")
        raw = b"".join(sets.get(name, ()))
        if hashlib.sha256(raw).hexdigest()[:16] != name:
            raise DamagedRecord(key, f"cannot be read: parts of its set {name!r} are missing")
    try:
        return zlib.decompress(raw)
    except zlib.error as e:
        raise DamagedRecord(key, f"cannot be read: {e!r}") from e


def parse_number(key: bytes, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as e:
        raise DamagedRecord(key, f"is not a number: {raw[:40]!r}") from e


def check_format(key: bytes, raw: bytes) -> None:
    if (found := parse_number(key, raw)) != FORMAT:
        what = f"has format {found}, but this lighthouse supports only {FORMAT}: start the version that wrote it"
        raise DamagedRecord(key, what)


# etcd takes 128 operations and 1.5 MiB in one transaction by default; a single record may need all of that.
BATCH_OPERATIONS = 100
BATCH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes to write to etcd in one transaction."""

    revision: int  # revision at which the leader's key was created
    version: int  # version of the leader's key before this batch
    changes: tuple[Change, ...]


class EtcdStore(Records):
    """The leader's records in memory, and its queue of changes to write to etcd.

    Args:
        prefix: Prefix for all keys.
        wake: Called when changes are queued.
        hold: Called for each queued change. Holds back the lighthouse's later output until the function that it
            returns is called.
    """

    def __init__(self, prefix: str, wake: Callable[[], None], hold: Callable[[], Callable[[], None]]) -> None:
        self.keys = EtcdKeys(prefix)
        super().__init__(self.keys)
        self._wake = wake
        self._hold = hold
        self._revision = 0
        self._version = 0
        self._sets: dict[bytes, set[str]] = {}  # names of the sets of parts in etcd, by the record's key
        self._changes: deque[tuple[Change, Callable[[], None]]] = deque()
        self._batch: Batch | None = None
        self.is_leading = False

    def take(self, found: Iterable[KeyValue]) -> None:
        """Replace the records in memory with `found`, the content of etcd. Raise DamagedRecord if one is unreadable."""
        rows: list[KeyValue] = []
        foreign: list[bytes] = []
        sets: defaultdict[bytes, defaultdict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        for kv in sorted(found, key=lambda kv: kv.key):
            match self.keys.parts(kv.key):
                case ["job", _, "part", name, _] | ["run", _, _, "part", name, _]:
                    sets[kv.key.rpartition(b"/part/")[0]][name].append(kv.value)
                case ["forgotten"] | ["job", _] | ["run", _, _] | ["key", _, _, _, _, _]:
                    rows.append(kv)
                case ["leader"] | ["term"] | ["format"]:
                    pass
                case _:
                    foreign.append(kv.key)
        rows.sort(key=lambda kv: kv.mod_revision)
        self.take_rows((kv.key, read_row(kv.key, kv.value, sets[kv.key])) for kv in rows)
        self._sets = {key: set(names) for key, names in sets.items() if names}
        if foreign:
            log.warning(
                "--store: ignoring %r and %d other keys below %s/, which no lighthouse of this version has written",
                foreign[0],
                len(foreign) - 1,
                self.keys.prefix,
                extra=event("store_foreign_keys", keys=len(foreign)),
            )

    def take_from(self, other: "EtcdStore") -> None:
        """Replace the records in memory with those that `other` has read."""
        self._jobs, self._runs, self.forgotten_id = other._jobs, other._runs, other.forgotten_id
        self._sets = other._sets

    def begin(self, term: int, revision: int) -> None:
        """Start accepting changes.

        Args:
            term: Number of this leadership, which grows with each leader.
            revision: Revision of etcd at which this lighthouse created the leader's key. Writes fail once that key is
                gone.
        """
        self.term, self._revision, self._version = term, revision, 1
        self.is_leading = True

    def end(self) -> None:
        """Stop accepting changes and discard those not yet written."""
        self.is_leading = False
        self._changes.clear()
        self._batch = None

    @property
    def is_written(self) -> bool:
        return self._batch is None and not self._changes

    def next_batch(self) -> Batch | None:
        """Return the batch to write, or None if there is none. It stays the same until written() or end() is called."""
        if self._batch is None and self._changes:
            self._batch = Batch(self._revision, self._version, tuple(self._next_changes()))
        return self._batch

    def written(self) -> None:
        """Remove the current batch, which etcd has acknowledged, and release the output held back for it."""
        assert self._batch is not None
        releases = [self._changes.popleft()[1] for _ in self._batch.changes]
        self._batch = None
        self._version += 1
        for release in releases:
            release()

    def _next_changes(self) -> Iterable[Change]:
        """Yield the changes of the next batch.

        etcd rejects a transaction that changes a key twice, so a batch contains each key only once. The deletion of a
        range, which may overlap with other changes, is a separate batch.
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

    def _write(self, changes: Sequence[Change]) -> None:
        if not self.is_leading:
            raise NotLeader("this lighthouse is not the leader, so it must not write")
        for change in changes:
            old = self._sets.pop(change.key, set())
            rows: Sequence[Change] = (change,)
            if isinstance(change, Put):
                raw = zlib.compress(change.value)
                rows = (Put(change.key, raw),)
                if len(raw) > RECORD_BYTES:
                    name, rows = split(change.key, raw)
                    self._sets[change.key] = {name}
            for row in rows:
                self._queue(row)
            for name in sorted(old - self._sets.get(change.key, set())):
                parts = parts_of(change.key, name)
                self._queue(Delete(parts, after_prefix(parts)))
        self._wake()

    def _queue(self, change: Change) -> None:
        self._changes.append((change, self._hold()))

    def _damaged(self, key: bytes, what: str) -> DamagedRecord:
        return DamagedRecord(key, what)


# -- batches as transactions


def guards(keys_: EtcdKeys, batch: Batch) -> list[Json]:
    return [etcd.was_made_at(keys_.leader, batch.revision), etcd.has_version(keys_.leader, batch.version)]


def operations(keys_: EtcdKeys, batch: Batch) -> list[Json]:
    return [etcd.touch(keys_.leader), *map(_operation, batch.changes)]


def _operation(change: Change) -> Json:
    match change:
        case Put(key, value):
            return etcd.put(key, value)
        case Delete(key, end):
            return etcd.delete(key, end)


def was_written(batch: Batch, leader: KeyValue | None) -> bool:
    """Return whether etcd rejected a batch because an earlier attempt has already written it.

    Args:
        batch: The rejected batch.
        leader: The current content of the leader's key in etcd.
    """
    return leader is not None and leader.create_revision == batch.revision and leader.version == batch.version + 1
