"""The journal: records of jobs and runs in a SQLite file.

- One lighthouse uses the file at a time (file_lock.py). If two do in spite of the lock, for example because a user has
  removed the lock file, the newer one has written a higher term into the file, and changes by the older one fail.
- With WAL and synchronous=FULL, a commit is on the disk when it returns. It is then copied from the write-ahead log
  into the file itself, so the loss of the log does not lose a committed record.
- A job has one row. The row of a forgotten job contains only its last quorum id. The newest FORGOTTEN_JOBS of these
  rows are kept. One number is the maximum over the ids of all others, and a job without a row starts above it.
- A run has one row, and so has each of its keys.
- Opening a file reads and checks everything before it writes anything. A file that is damaged, of another version or of
  another program stays unchanged. SQLite checks its pages but not their content, so every row has a checksum.
- A new file is created under another name and renamed when it is complete.
- Every error is raised as a LighthouseError that names the file and the remedy.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
from lighthouse.store.file_lock import FileLock
from lighthouse_protocol.limits import MAX_QUORUM_ID
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import InvalidRequest, WrongState
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.files import make_private, state_folder

log = logging.getLogger(__name__)


VERSION = 2
_APPLICATION_ID = b"LHJL"
_HEADER_BYTES = 100
# No other process should write. A wait blocks the event loop.
_BUSY_S = 0.5

_TABLES = (
    "CREATE TABLE lighthouse ("
    "id INTEGER PRIMARY KEY, term INTEGER NOT NULL, forgotten_id INTEGER NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE job (name TEXT NOT NULL UNIQUE, quorum_id INTEGER NOT NULL, record BLOB, checksum INTEGER NOT NULL)",
    "CREATE TABLE run (job TEXT NOT NULL, name TEXT NOT NULL, is_finished INTEGER NOT NULL, record BLOB NOT NULL, "
    "checksum INTEGER NOT NULL, UNIQUE (job, name))",
    "CREATE TABLE run_key (job TEXT NOT NULL, run TEXT NOT NULL, generation INTEGER NOT NULL, kind TEXT NOT NULL, "
    "name TEXT NOT NULL, value BLOB NOT NULL, checksum INTEGER NOT NULL, UNIQUE (job, run, generation, kind, name))",
)

_WRITABLE = "the lighthouse's user must be able to write the file and its folder"
_SPACE = "free space on its disk"
_DISK = "look at its disk"
_DESCRIPTORS = "raise the limit of open files (ulimit -n)"
# Do not suggest restoring a copy: a quorum older than the members' would be taken for the last one.
_MOVE = "move it away (and keep it), and the next start creates a new one (jobs then wait one lease); or set --journal"
_REMEDIES = {
    sqlite3.SQLITE_FULL: _SPACE,
    sqlite3.SQLITE_READONLY: _WRITABLE,
    sqlite3.SQLITE_PERM: _WRITABLE,
    sqlite3.SQLITE_CANTOPEN: _WRITABLE,
    sqlite3.SQLITE_CORRUPT: _MOVE,
    sqlite3.SQLITE_NOTADB: _MOVE,
    sqlite3.SQLITE_ERROR: _MOVE,
    sqlite3.SQLITE_BUSY: "another process has it open; end that one",
}
_OS_REMEDIES = {
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EIO: _DISK,
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
}


@dataclass(frozen=True, slots=True)
class Head:
    """Values that belong to the whole journal, stored in one row."""

    term: int
    forgotten_id: int  # highest quorum id of all jobs without a row


class Damaged(WrongState):
    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"--journal: {path} is damaged ({what}); {_MOVE}")


@contextlib.contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """Convert errors of SQLite and the operating system within the context to WrongState, which gives a remedy."""
    try:
        yield
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # missing on text that is not UTF-8
        what, remedy = str(e), _REMEDIES.get(code, _DISK)
        if code == sqlite3.SQLITE_CANTOPEN and (why := _no_descriptor()):  # SQLite does not give the reason
            what, remedy = f"{e}: {why}", _DESCRIPTORS
        raise WrongState(f"--journal: {path}: {what}; {remedy}") from e
    except UnicodeDecodeError as e:  # in the text of an SQLite error
        raise Damaged(path, "a text in it cannot be read") from e
    except OSError as e:
        remedy = _OS_REMEDIES.get(e.errno or 0, "name another file by --journal")
        raise WrongState(f"--journal: {path}: {e.strerror or e}; {remedy}") from e


def _no_descriptor() -> str:
    """Return why this process cannot open any file, or an empty string if it can."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return os.strerror(e.errno or 0)
    return ""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Connect to a SQLite file in autocommit mode, so that only BEGIN and COMMIT delimit transactions.

    `mode` is SQLite's URI parameter, for example rw.
    """
    uri = f"{path.as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)


# -- creating and checking; only for the holder of the lock


def check_kind(path: Path) -> None:
    """Raise InvalidRequest if the path exists and is not a regular file. Opening a pipe, for example, would block."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InvalidRequest(f"{path} is a directory; name a file in it", field="--journal")
        if not stat.S_ISREG(mode):
            raise InvalidRequest(f"{path} is not a regular file; name one", field="--journal")


def create_if_empty(path: Path) -> None:
    if path.exists() and path.stat().st_size > 0:
        return
    new = beside(path, ".new")
    # SQLite would replay an old log into the new file.
    for leftover in (new, *(beside(path, end) for end in (".new-journal", ".new-wal", ".new-shm", "-wal", "-shm"))):
        leftover.unlink(missing_ok=True)
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(connect(new, "rw")) as db:
            _lay_out(db)
        new.replace(path)
    finally:
        for leftover in (new, beside(path, ".new-journal")):
            leftover.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _lay_out(db: sqlite3.Connection) -> None:
    db.execute("BEGIN")
    db.execute(f"PRAGMA application_id = {int.from_bytes(_APPLICATION_ID)}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    for table in _TABLES:
        db.execute(table)
    put_head(db, Head(0, 0))
    db.execute("COMMIT")
    db.execute("PRAGMA journal_mode = WAL")


def has_rows(db: sqlite3.Connection) -> bool:
    return any(db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in ("job", "run"))


def _get_tables(db: sqlite3.Connection) -> tuple[str, ...]:
    """Return the tables' CREATE statements, which SQLite stores verbatim."""
    return tuple(sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' ORDER BY rowid"))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def check(path: Path, check_runs: Callable[[sqlite3.Connection, Path], None]) -> None:
    """Check that the file is a complete journal of this version, without changing it.

    Args:
        path: The file.
        check_runs: Checks the rows of runs.

    Raises:
        WrongState: If the file is damaged or of another version.
        InvalidRequest: If it is not a journal.
    """
    _check_header(path)
    log = beside(path, "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    # Without a log `immutable` misses nothing, and SQLite creates no files next to this one.
    with contextlib.closing(connect(path, "ro" if has_log else "ro&immutable=1")) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise WrongState(
                f"--journal: {path} has version {version}, and this lighthouse knows {VERSION}: "
                "start the lighthouse that wrote it, or name another file by --journal"
            )
        found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise Damaged(path, found)
        if _get_tables(db) != _TABLES:
            raise Damaged(path, "its tables are not those that it was made with")
        get_head(db, path)
        get_records(db, path)
        check_runs(db, path)


def _check_header(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # opened for writing, too: SQLite would fall back to read-only
    try:
        header = os.pread(fd, _HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if not header.startswith(b"SQLite format 3\0"):
        raise InvalidRequest(f"{path} is not a journal; name another file, or a new one", field="--journal")
    if len(header) < _HEADER_BYTES:
        raise Damaged(path, "it is cut off")
    if header[68:72] != _APPLICATION_ID:
        raise InvalidRequest(f"{path} belongs to another program; name another file, or a new one", field="--journal")


# -- rows of jobs


def checksum(values: tuple[object, ...], raw: bytes | None = None) -> int:
    return zlib.crc32(raw or b"", zlib.crc32(repr((*values, raw is None)).encode()))


def get_head(db: sqlite3.Connection, path: Path) -> Head:
    rows = db.execute("SELECT term, forgotten_id, checksum FROM lighthouse").fetchall()
    if len(rows) != 1 or rows[0][2] != checksum(rows[0][:2]):
        raise Damaged(path, "its term is not what was written")
    return Head(*rows[0][:2])


def put_head(db: sqlite3.Connection, head: Head) -> None:
    values = (head.term, head.forgotten_id)
    db.execute("INSERT OR REPLACE INTO lighthouse VALUES (1, ?, ?, ?)", (*values, checksum(values)))


def get_records(db: sqlite3.Connection, path: Path) -> dict[str, QuorumRecord]:
    rows = db.execute("SELECT name, quorum_id, record, checksum FROM job").fetchall()
    return {row[0]: _record(path, *row) for row in rows}


def _record(path: Path, job: str, quorum_id: int, raw: bytes | None, written: int) -> QuorumRecord:
    if written != checksum((job, quorum_id), raw):
        raise Damaged(path, f"job {job!r} is not what was written")
    if quorum_id >= MAX_QUORUM_ID:
        raise Damaged(path, f"job {job!r} has no id left after {quorum_id}")
    if raw is None:
        return QuorumRecord(quorum_id)
    try:
        return parse_quorum(raw)
    except (ValueError, TypeError, KeyError) as e:
        raise Damaged(path, f"job {job!r} cannot be read: {e!r}") from e


def get_id(db: sqlite3.Connection, job: str) -> int | None:
    row = db.execute("SELECT quorum_id FROM job WHERE name = ?", (job,)).fetchone()
    return row[0] if row else None


def put_record(db: sqlite3.Connection, job: str, record: QuorumRecord) -> None:
    _put(db, job, record.quorum_id, dump_quorum(record))


def put_forgotten(db: sqlite3.Connection, job: str, quorum_id: int) -> None:
    _put(db, job, quorum_id, None)


def _put(db: sqlite3.Connection, job: str, quorum_id: int, raw: bytes | None) -> None:
    # A replaced row gets a new rowid, so rows are in the order of their last change.
    row = (job, quorum_id, raw, checksum((job, quorum_id), raw))
    db.execute("INSERT OR REPLACE INTO job (name, quorum_id, record, checksum) VALUES (?, ?, ?, ?)", row)


def pop_forgotten(db: sqlite3.Connection, but_newest: int) -> list[int]:
    """Delete the rows of forgotten jobs except the newest `but_newest`. Return the quorum ids in the deleted rows."""
    rows = db.execute(
        "SELECT rowid, quorum_id FROM job WHERE record IS NULL ORDER BY rowid DESC LIMIT -1 OFFSET ?", (but_newest,)
    ).fetchall()
    db.executemany("DELETE FROM job WHERE rowid = ?", [(rowid,) for rowid, _ in rows])
    return [quorum_id for _, quorum_id in rows]


# -- rows of runs

T = TypeVar("T")

_RUN = "SELECT is_finished, CAST(record AS BLOB), checksum FROM run WHERE job = ? AND name = ?"
_KEYS = "SELECT generation, kind, name, CAST(value AS BLOB), checksum FROM run_key WHERE job = ? AND run = ?"


def check_run_rows(db: sqlite3.Connection, path: Path) -> None:
    """Check the rows of all runs and their keys.

    Raises:
        Damaged: If a row cannot be parsed or its checksum is wrong.
    """
    for job, run in get_names(db, -1):
        get_run(db, path, (job, run))


def get_names(db: sqlite3.Connection, newest: int) -> list[RunName]:
    """Return the names of the `newest` most recently changed runs, or of all runs for -1. The newest comes last."""
    rows = db.execute("SELECT job, name FROM run ORDER BY rowid DESC LIMIT ?", (newest,)).fetchall()
    return [(job, run) for job, run in reversed(rows)]


def get_run(db: sqlite3.Connection, path: Path, name: RunName) -> SavedRun | None:
    row = db.execute(_RUN, name).fetchone()
    if row is None:
        return None
    is_finished, raw, written = row
    if written != checksum((*name, is_finished), raw):
        raise Damaged(path, f"run {name[1]!r} of job {name[0]!r} is not what was written")
    record = _read(path, f"run {name[1]!r} of job {name[0]!r}", lambda: parse_run(raw))
    return SavedRun(record, tuple(_key(path, name, *key) for key in db.execute(_KEYS, name)))


def _key(path: Path, run: RunName, generation: int, kind: str, name: str, value: bytes, written: int) -> Row:
    if written != checksum((*run, generation, kind, name), value):
        raise Damaged(path, f"key {name!r} of run {run[1]!r} is not what was written")
    return generation, _read(path, f"key {name!r}", lambda: KeyKind(kind)), name, value


def _read(path: Path, what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, TypeError, KeyError) as e:
        raise Damaged(path, f"{what} cannot be read: {e!r}") from e


def put_run(db: sqlite3.Connection, name: RunName, record: RunRecord, keys_from: int) -> None:
    is_new = db.execute("SELECT 1 FROM run WHERE job = ? AND name = ?", name).fetchone() is None
    is_finished, raw = int(record.completed is not None or record.stop is not None), dump_run(record)
    row = (*name, is_finished, raw, checksum((*name, is_finished), raw))
    # A replaced row gets a new rowid, so rows are in the order of their last change.
    db.execute("INSERT OR REPLACE INTO run (job, name, is_finished, record, checksum) VALUES (?, ?, ?, ?, ?)", row)
    db.execute("DELETE FROM run_key WHERE job = ? AND run = ? AND generation < ?", (*name, keys_from))
    if is_new:
        _thin_out(db)


def put_key(db: sqlite3.Connection, run: RunName, row: Row) -> None:
    generation, kind, name, value = row
    written = checksum((*run, generation, str(kind), name), value)
    db.execute(
        "INSERT OR REPLACE INTO run_key (job, run, generation, kind, name, value, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*run, generation, str(kind), name, value, written),
    )


def _thin_out(db: sqlite3.Connection) -> None:
    """Delete the oldest finished runs above FINISHED_RUNS_KEPT, and the oldest of all runs above RUNS_KEPT."""
    finished = "SELECT job, name FROM run WHERE is_finished = 1 ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    rest = "SELECT job, name FROM run ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    old = [*db.execute(finished, (FINISHED_RUNS_KEPT,)), *db.execute(rest, (RUNS_KEPT,))]
    db.executemany("DELETE FROM run WHERE job = ? AND name = ?", old)
    db.executemany("DELETE FROM run_key WHERE job = ? AND run = ?", old)


def default_path() -> Path:
    """Return the default path of the journal.

    Raises:
        InvalidRequest: If the user has no home directory.
    """
    return state_folder("--journal") / "journal.sqlite"


class Journal:
    """A RecordStore in a SQLite file.

    `owner` describes this process in the error of another lighthouse that tries to use the file.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path = Path(os.path.realpath(path))
        self.term = 0
        self._lock = FileLock(self.path, owner)
        self._db: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._is_read = False

    def claim(self) -> int:
        """Lock the file, check it and increment its term. Create the file if it is missing or empty.

        Returns:
            The new term.

        Raises:
            WrongState: If another process uses the file, or it is damaged. The file is unchanged.
            InvalidRequest: If the file is not a journal. It is unchanged.
        """
        with explained(self.path):
            check_kind(self.path)
            make_private(self.path.parent)
            self._lock.take()
            try:
                create_if_empty(self.path)
                check(self.path, check_run_rows)
                return self._open()
            except BaseException:
                self.release()
                raise

    def load(self) -> Mapping[str, QuorumRecord]:
        with explained(self.path):
            return get_records(self._opened(), self.path)

    def last_id(self, job: str) -> int:
        with explained(self.path):
            db = self._opened()
            quorum_id = get_id(db, job)
            return get_head(db, self.path).forgotten_id if quorum_id is None else quorum_id

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Store a job's record.

        Raises:
            ValueError: If its quorum id is lower than the job's last one.
        """
        with self._change() as db:
            last_id = get_id(db, job)
            if last_id is not None and record.quorum_id < last_id:
                raise ValueError(f"{job} named quorum {last_id}; its ids must not go back to {record.quorum_id}")
            put_record(db, job, record)

    def forget(self, job: str) -> None:
        """Delete a job's record except for its last quorum id. Does nothing for a job without a row."""
        with explained(self.path):
            last_id = get_id(self._opened(), job)
        if last_id is None:
            return
        with self._change() as db:
            put_forgotten(db, job, last_id)
            self._thin_out(db)

    def load_run(self, name: RunName) -> SavedRun | None:
        with explained(self.path):
            return get_run(self._opened(), self.path, name)

    def run_names(self, newest: int) -> Sequence[RunName]:
        with explained(self.path):
            return get_names(self._opened(), newest)

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        with self._change() as db:
            put_run(db, name, record, keys_from)

    def commit_key(self, name: RunName, row: Row) -> None:
        with self._change() as db:
            put_key(db, name, row)

    def release(self, *, is_unused: bool = False) -> None:
        """Close and unlock the file.

        Args:
            is_unused: The lighthouse failed to start. Delete the file if claim() created it and it has no rows.
        """
        if self._lock.is_held and self._db is not None:
            is_new = is_unused and self.term == 1 and not has_rows(self._db)
            self._db.close()
            self._db = None
            if is_new:
                with contextlib.suppress(OSError):
                    self.path.unlink()
        self._lock.drop()

    def _open(self) -> int:
        self._db = db = connect(self.path, "rw")
        self._file = self.path.stat()
        db.execute("PRAGMA synchronous = FULL")
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise WrongState(f"--journal: {self.path} cannot be kept in WAL mode ({mode}); name one on a local disk")
        with _transaction(db):
            head = get_head(db, self.path)
            put_head(db, replace(head, term=head.term + 1))
        self._copy_log(db)
        self.term = head.term + 1
        return self.term

    def _thin_out(self, db: sqlite3.Connection) -> None:
        ids = pop_forgotten(db, FORGOTTEN_JOBS)
        if ids:
            head = get_head(db, self.path)
            put_head(db, replace(head, forgotten_id=max(head.forgotten_id, *ids)))

    @contextlib.contextmanager
    def _change(self) -> Generator[sqlite3.Connection, None, None]:
        with explained(self.path):
            db = self._opened()
            self._check_place()
            with _transaction(db):
                self._check_term(db)
                yield db
            self._copy_log(db)

    def _copy_log(self, db: sqlite3.Connection) -> None:
        """Copy the write-ahead log into the file and truncate it.

        While another program reads the file, this has to wait until a later commit. That is logged once.
        """
        is_busy = bool(db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
        if is_busy and not self._is_read:
            log.warning(
                "--journal: another process has %s open; copy it together with %s-wal, which has the newest records",
                self.path,
                self.path.name,
                extra=event("journal_read_elsewhere", journal=str(self.path)),
            )
        self._is_read = is_busy

    def _opened(self) -> sqlite3.Connection:
        if self._db is None or not self._lock.is_held:
            raise WrongState(f"--journal: {self.path} is not claimed by this process")
        return self._db

    def _check_place(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(self.path.stat(), self._file):
                return
        raise WrongState(f"--journal: {self.path} was removed or replaced under this lighthouse; restart it")

    def _check_term(self, db: sqlite3.Connection) -> None:
        term = get_head(db, self.path).term
        if term != self.term:
            raise WrongState(
                f"--journal: {self.path} was taken over by another lighthouse "
                f"(term {term}, this one's is {self.term}); end one of them"
            )


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None, None, None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


ROWS_SHOWN = 1000


def journal_summary(path: Path) -> dict[str, Any]:
    """Summarise a journal for a bug report: ids and sizes, but not the values of keys.

    The file is only read, so the lighthouse may be running.

    Raises:
        WrongState: If the file cannot be read as a journal.
        InvalidRequest: If it is not a regular file.
    """
    path = Path(os.path.realpath(path))
    with explained(path):
        check_kind(path)
        status = path.stat()
        with contextlib.closing(connect(path, "ro")) as db:
            term, forgotten_id = db.execute("SELECT term, forgotten_id FROM lighthouse").fetchone()
            jobs = db.execute("SELECT name, quorum_id, length(record) FROM job ORDER BY name LIMIT ?", (ROWS_SHOWN,))
            runs = db.execute(
                "SELECT job, name, is_finished, length(record) FROM run ORDER BY job, name LIMIT ?", (ROWS_SHOWN,)
            )
            keys = db.execute(
                "SELECT job, run, count(*), sum(length(value)) FROM run_key GROUP BY job, run LIMIT ?", (ROWS_SHOWN,)
            )
            return {
                "path": str(path),
                "bytes": status.st_size,
                "written_unix_s": status.st_mtime,
                "integrity": db.execute("PRAGMA quick_check").fetchone()[0],
                "term": term,
                "forgotten_id": forgotten_id,
                "jobs": _named(("job", "quorum_id", "record_bytes"), jobs),
                "runs": _named(("job", "run", "is_finished", "record_bytes"), runs),
                "keys": _named(("job", "run", "keys", "value_bytes"), keys),
            }


def _named(names: tuple[str, ...], rows: Any) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in rows]
