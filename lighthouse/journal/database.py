"""A journal's file: how it is made, what makes it trusted, and its rows. Rules:

- Before anything is written, everything is read: a file that is damaged, of another version or not ours stays as it
  is. SQLite checks its pages, not what is in them, so every row has a checksum.
- A new file is made under another name and renamed when it is complete. So there is no half-made one.
- Every way in which a file can fail its user becomes a refusal that names it and what to do.
"""

import contextlib
import errno
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from lighthouse.quorum.rules.record import QuorumRecord, dump, parse
from lighthouse_protocol.limits import MAX_QUORUM_ID
from lighthouse_protocol.refusals import InvalidRequest, WrongState

VERSION = 2
_APPLICATION_ID = b"LHJL"
_HEADER_BYTES = 100
# No other process writes, unless by hand. The loop stands still meanwhile.
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
# Not "restore a copy": a quorum that is older than what members hold would be taken for the last one.
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
    """The one row that is not a job's. `forgotten_id`: the highest id of any job that has no row any more."""

    term: int
    forgotten_id: int


class Damaged(WrongState):
    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"--journal: {path} is damaged ({what}); {_MOVE}")


@contextlib.contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """SQLite's and the system's errors as WrongState."""
    try:
        yield
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # text that is not UTF-8 has none
        what, remedy = str(e), _REMEDIES.get(code, _DISK)
        if code == sqlite3.SQLITE_CANTOPEN and (why := _no_descriptor()):  # SQLite does not say why it cannot
            what, remedy = f"{e}: {why}", _DESCRIPTORS
        raise WrongState(f"--journal: {path}: {what}; {remedy}") from e
    except UnicodeDecodeError as e:  # of the text of an error
        raise Damaged(path, "a text in it cannot be read") from e
    except OSError as e:
        remedy = _OS_REMEDIES.get(e.errno or 0, "name another file by --journal")
        raise WrongState(f"--journal: {path}: {e.strerror or e}; {remedy}") from e


def _no_descriptor() -> str:
    """Return why this process can open no file at all, or an empty text."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        return os.strerror(e.errno or 0)
    return ""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """In autocommit: a transaction is what is between BEGIN and COMMIT."""
    uri = f"{path.as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)


# -- making and checking; only by the holder of the lock


def check_kind(path: Path) -> None:
    """Opening a pipe would wait for its other end, so before it is opened."""
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
    # A log without its file would be replayed into the new one.
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
    """Whether it knows of a job or a run."""
    return any(db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in ("job", "run"))


def _get_tables(db: sqlite3.Connection) -> tuple[str, ...]:
    """SQLite keeps the text of each as it was given."""
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
    """Raises WrongState or InvalidRequest for a file that is not a whole journal of this version; changes nothing."""
    _check_header(path)
    log = beside(path, "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    # Without a log nothing is left out by `immutable`, and no file is made beside it.
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
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing, too: SQLite would go on without
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


# -- rows


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
        return parse(raw)
    except (ValueError, TypeError, KeyError) as e:
        raise Damaged(path, f"job {job!r} cannot be read: {e!r}") from e


def get_id(db: sqlite3.Connection, job: str) -> int | None:
    row = db.execute("SELECT quorum_id FROM job WHERE name = ?", (job,)).fetchone()
    return row[0] if row else None


def put_record(db: sqlite3.Connection, job: str, record: QuorumRecord) -> None:
    _put(db, job, record.quorum_id, dump(record))


def put_forgotten(db: sqlite3.Connection, job: str, quorum_id: int) -> None:
    _put(db, job, quorum_id, None)


def _put(db: sqlite3.Connection, job: str, quorum_id: int, raw: bytes | None) -> None:
    # A row that is replaced gets a new rowid: they are in the order of the last change.
    row = (job, quorum_id, raw, checksum((job, quorum_id), raw))
    db.execute("INSERT OR REPLACE INTO job (name, quorum_id, record, checksum) VALUES (?, ?, ?, ?)", row)


def pop_forgotten(db: sqlite3.Connection, but_newest: int) -> list[int]:
    """Remove the rows of all forgotten jobs but the newest; their ids."""
    rows = db.execute(
        "SELECT rowid, quorum_id FROM job WHERE record IS NULL ORDER BY rowid DESC LIMIT -1 OFFSET ?", (but_newest,)
    ).fetchall()
    db.executemany("DELETE FROM job WHERE rowid = ?", [(rowid,) for rowid, _ in rows])
    return [quorum_id for _, quorum_id in rows]
