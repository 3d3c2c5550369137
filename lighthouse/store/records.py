"""Records of jobs and runs, in memory and as the rows of a durable store.

`Records` implements what the stores have in common: which rows a change writes and deletes, and how rows are parsed.
Subclasses decide where the rows are kept. A row is a key and a value:

    forgotten                           highest quorum id of all jobs without a row
    job/JOB                             the job's record; for a forgotten job, only its last quorum id
    run/JOB/RUN                         the run's record
    key/JOB/RUN/GENERATION/KIND/NAME    one key of a run

Names are percent-encoded. All keys of a store share a prefix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import quote, unquote

from lighthouse.job.records import (
    QuorumRecord,
    Row,
    RunName,
    RunRecord,
    SavedRun,
    dump_quorum,
    dump_run,
    parse_quorum,
    parse_run,
)
from lighthouse.job.store import FINISHED_RUNS_KEPT, FORGOTTEN_JOBS, RUNS_KEPT
from lighthouse_protocol.limits import MAX_QUORUM_ID
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import WrongState

T = TypeVar("T")


class Keys:
    """Keys of the rows. Numbers have leading zeros, so that keys sort by number."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.all = f"{prefix}/".encode()  # the prefix of all keys
        self.term = self._key("term")
        self.forgotten = self._key("forgotten")

    def job(self, job: str) -> bytes:
        return self._key("job", job)

    def run(self, name: RunName) -> bytes:
        return self._key("run", *name)

    def run_keys(self, name: RunName) -> bytes:
        """Return the prefix under which all keys of a run are stored."""
        return self._key("key", *name) + b"/"

    def run_keys_from(self, name: RunName, generation: int) -> bytes:
        """Return the prefix of a run's keys in `generation`. The prefix sorts after all keys of earlier generations."""
        return self.run_keys(name) + padded(generation).encode() + b"/"

    def run_key(self, run: RunName, row: Row) -> bytes:
        generation, kind, name, _ = row
        return self._key("key", *run, padded(generation), kind.value, name)

    def _key(self, *parts: str) -> bytes:
        return "/".join((self.prefix, *(quote(part, safe="") for part in parts))).encode()

    def parts(self, key: bytes) -> list[str]:
        """Split a key, without the prefix, into its decoded parts. Return an empty list if the key is malformed."""
        parts = [unquote(part) for part in key.decode(errors="replace").removeprefix(f"{self.prefix}/").split("/")]
        return parts if self._key(*parts) == key else []


def padded(number: int) -> str:
    return f"{number:016d}"


def after_prefix(prefix: bytes) -> bytes:
    """Return the exclusive end of the range of keys that start with `prefix`, which must not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


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


class Records(ABC):
    """Base class of the stores. It implements RecordStore, except for reading and writing the rows."""

    def __init__(self, keys: Keys) -> None:
        self.term = 0
        self._keys = keys
        self._jobs: dict[str, QuorumRecord] = {}  # in the order of their last change, as _runs
        self._runs: dict[RunName, SavedRun] = {}
        self.forgotten_id = 0

    @abstractmethod
    def _write(self, changes: Sequence[Change]) -> None:
        """Write all changes, or queue them and hold back output until they are written.

        Raise an error if the changes can be neither written nor queued.
        """

    @abstractmethod
    def _damaged(self, key: bytes, what: str) -> WrongState:
        """Return the error for a damaged row. `what` says what is wrong, for example "is of an unknown kind"."""

    def load(self) -> Mapping[str, QuorumRecord]:
        return dict(self._jobs)

    def last_id(self, job: str) -> int:
        record = self._jobs.get(job)
        return self.forgotten_id if record is None else record.quorum_id

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Store a job's record. Raise ValueError if its quorum id is lower than that of the job's stored record."""
        last = self._jobs.get(job)
        if last is not None and record.quorum_id < last.quorum_id:
            raise ValueError(f"{job} named quorum {last.quorum_id}; its ids must not go back to {record.quorum_id}")
        self._write([Put(self._keys.job(job), dump_quorum(record))])
        self._jobs.pop(job, None)
        self._jobs[job] = record

    def forget(self, job: str) -> None:
        """Delete a job's record except for its last quorum id.

        The FORGOTTEN_JOBS jobs that were forgotten last keep their own ids. Of all older ids, only the highest is kept.
        """
        if (last := self._jobs.get(job)) is None:
            return
        record = QuorumRecord(last.quorum_id)
        jobs = {name: other for name, other in self._jobs.items() if name != job} | {job: record}
        forgotten = [name for name, other in jobs.items() if other.quorum is None]
        old = forgotten[: max(0, len(forgotten) - FORGOTTEN_JOBS)]
        forgotten_id = max([self.forgotten_id, *(jobs.pop(name).quorum_id for name in old)])
        changes: list[Change] = [Put(self._keys.job(job), dump_quorum(record))]
        if old:
            changes.append(Put(self._keys.forgotten, str(forgotten_id).encode()))  # before their rows are deleted
            changes += [Delete(self._keys.job(name)) for name in old]
        self._write(changes)
        self._jobs, self.forgotten_id = jobs, forgotten_id

    def load_run(self, name: RunName) -> SavedRun | None:
        return self._runs.get(name)

    def run_names(self, newest: int) -> Sequence[RunName]:
        return list(self._runs)[-newest:] if newest >= 0 else list(self._runs)

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        old = self._runs.get(name)
        keys = old.keys if old is not None else ()
        kept = tuple(row for row in keys if row[0] >= keys_from)
        changes: list[Change] = [Put(self._keys.run(name), dump_run(record))]
        if len(kept) < len(keys):
            changes.append(Delete(self._keys.run_keys(name), self._keys.run_keys_from(name, keys_from)))
        surplus = () if old is not None else _surplus_runs({**self._runs, name: SavedRun(record)})
        for run in surplus:
            keys_of_run = self._keys.run_keys(run)
            changes += [Delete(self._keys.run(run)), Delete(keys_of_run, after_prefix(keys_of_run))]
        self._write(changes)
        for run in (name, *surplus):
            self._runs.pop(run, None)
        self._runs[name] = SavedRun(record, kept)

    def commit_key(self, name: RunName, row: Row) -> None:
        self._write([Put(self._keys.run_key(name, row), row[3])])
        saved = self._runs[name]
        self._runs[name] = replace(saved, keys=(*(old for old in saved.keys if old[:3] != row[:3]), row))

    def take_rows(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Replace the records in memory with those in `rows`, which must start with the least recently changed one."""
        self._jobs, self._runs, self.forgotten_id = {}, {}, 0
        run_keys: dict[RunName, list[Row]] = {}
        for key, value in rows:
            match self._keys.parts(key):
                case ["forgotten"]:
                    self.forgotten_id = self._parse(key, int, value)
                case ["job", job]:
                    self._jobs[job] = record = self._parse(key, parse_quorum, value)
                    if record.quorum_id >= MAX_QUORUM_ID:
                        raise self._damaged(key, f"has no id left after {record.quorum_id}")
                case ["run", job, run]:
                    self._runs[job, run] = SavedRun(self._parse(key, parse_run, value))
                case ["key", job, run, generation, kind, name]:
                    row = (self._parse(key, int, generation), self._parse(key, KeyKind, kind), name, value)
                    run_keys.setdefault((job, run), []).append(row)
                case _:
                    raise self._damaged(key, "is of an unknown kind")
        for name, keys in run_keys.items():
            if name in self._runs:
                self._runs[name] = replace(self._runs[name], keys=tuple(keys))

    def _parse(self, key: bytes, parse: Callable[..., T], value: str | bytes) -> T:
        try:
            return parse(value)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise self._damaged(key, f"cannot be read: {e!r}") from e


def is_finished(record: RunRecord) -> bool:
    return record.completed is not None or record.stop is not None


def _surplus_runs(runs: Mapping[RunName, SavedRun]) -> Sequence[RunName]:
    """Return the runs to drop: the oldest finished ones beyond FINISHED_RUNS_KEPT, then the oldest beyond RUNS_KEPT."""
    finished = [name for name, run in runs.items() if is_finished(run.record)]
    old = finished[: max(0, len(finished) - FINISHED_RUNS_KEPT)]
    rest = [name for name in runs if name not in old]
    return (*old, *rest[: max(0, len(rest) - RUNS_KEPT)])
