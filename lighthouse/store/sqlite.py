"""The journal: records of jobs and runs in a SQLite file.

- One lighthouse uses the file at a time (file_lock.py). If two use it despite the lock, for example because a user has
  removed the lock file, the newer one has written a higher term into the file, so writes by the older one fail.
- With WAL and synchronous=FULL, a commit is on the disk when it returns. It is then copied from the write-ahead log
  into the file itself, so the loss of the log does not lose a committed record.
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
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from lighthouse.store.file_lock import FileLock
from lighthouse.store.records import Change, Keys, Put, Records, is_finished
from lighthouse_protocol.refusals import InvalidRequest, WrongState
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.files import make_private, state_folder, sync_folder

log = logging.getLogger(__name__)


VERSION = 3
_APPLICATION_ID = b"LHJL"
_HEADER_BYTES = 100
# No other process should write. A wait blocks the event loop.
_BUSY_S = 0.5

# A replaced row gets a new rowid, so rows are in the order of their last change.
_TABLE = "CREATE TABLE record (key TEXT NOT NULL UNIQUE, value BLOB NOT NULL, checksum INTEGER NOT NULL)"
_KEYS = Keys()

_WRITABLE = "the lighthouse's user must be able to write the file and its folder"
_SPACE = "free space on its disk"
_DISK = "check its disk"
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


class DamagedJournal(WrongState):
    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"--journal: {path} is damaged ({what}); {_MOVE}")


@contextlib.contextmanager
def convert_errors(path: Path) -> Generator[None, None, None]:
    """Convert errors of SQLite and the operating system inside the `with` block to WrongState, with a remedy."""
    try:
        yield
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # missing on text that is not UTF-8
        what, remedy = str(e), _REMEDIES.get(code, _DISK)
        if code == sqlite3.SQLITE_CANTOPEN and (why := _no_descriptor()):  # SQLite does not give the reason
            what, remedy = f"{e}: {why}", _DESCRIPTORS
        raise WrongState(f"--journal: {path}: {what}; {remedy}") from e
    except UnicodeDecodeError as e:  # in the text of an SQLite error
        raise DamagedJournal(path, "it contains text that is not UTF-8") from e
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
    new = sibling_path(path, ".new")
    # SQLite would replay an old log into the new file.
    suffixes = (".new-journal", ".new-wal", ".new-shm", "-wal", "-shm")
    for leftover in (new, *(sibling_path(path, suffix) for suffix in suffixes)):
        leftover.unlink(missing_ok=True)
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(connect(new, "rw")) as db:
            _lay_out(db)
        new.replace(path)
    finally:
        for leftover in (new, sibling_path(path, ".new-journal")):
            leftover.unlink(missing_ok=True)
    sync_folder(path.parent)


def _lay_out(db: sqlite3.Connection) -> None:
    db.execute("BEGIN")
    db.execute(f"PRAGMA application_id = {int.from_bytes(_APPLICATION_ID)}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute(_TABLE)
    put_row(db, _KEYS.term, b"0")
    db.execute("COMMIT")
    db.execute("PRAGMA journal_mode = WAL")


def sibling_path(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def read_rows(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the rows of a journal, after checking that it is complete and of this version. The file is unchanged.

    Raises:
        WrongState: If the file is damaged or of another version.
        InvalidRequest: If it is not a journal.
    """
    _check_header(path)
    log = sibling_path(path, "-wal")
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
            raise DamagedJournal(path, found)
        # SQLite stores the statement verbatim.
        if db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table'").fetchall() != [(_TABLE,)]:
            raise DamagedJournal(path, "its table is not the one that it was made with")
        _get_term(db, path)
        return _get_rows(db, path)


def _check_header(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # opened for writing, too: SQLite would fall back to read-only
    try:
        header = os.pread(fd, _HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if not header.startswith(b"SQLite format 3\0"):
        raise InvalidRequest(f"{path} is not a journal; name another file, or a new one", field="--journal")
    if len(header) < _HEADER_BYTES:
        raise DamagedJournal(path, "it is cut off")
    if header[68:72] != _APPLICATION_ID:
        raise InvalidRequest(f"{path} belongs to another program; name another file, or a new one", field="--journal")


# -- rows


def _checksum(key: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key + b"\n"))


def _get_rows(db: sqlite3.Connection, path: Path) -> list[tuple[bytes, bytes]]:
    """Return all rows except that of the term, the least recently changed first.

    Raise DamagedJournal if a checksum is wrong. The error names `path`.
    """
    rows: list[tuple[bytes, bytes]] = []
    for name, value, checksum in db.execute("SELECT key, CAST(value AS BLOB), checksum FROM record ORDER BY rowid"):
        key = str(name).encode(errors="replace")
        if checksum != _checksum(key, value):
            raise DamagedJournal(path, f"{name!r} is not what was written")
        if key != _KEYS.term:
            rows.append((key, value))
    return rows


def _get_term(db: sqlite3.Connection, path: Path) -> int:
    select = "SELECT CAST(value AS BLOB), checksum FROM record WHERE key = ?"
    row = db.execute(select, (_KEYS.term.decode(),)).fetchone()
    if row is None or row[1] != _checksum(_KEYS.term, row[0]):
        raise DamagedJournal(path, "its term is not what was written")
    return int(row[0])


def put_row(db: sqlite3.Connection, key: bytes, value: bytes) -> None:
    row = (key.decode(), value, _checksum(key, value))
    db.execute("INSERT OR REPLACE INTO record (key, value, checksum) VALUES (?, ?, ?)", row)


def default_path() -> Path:
    """Return the default path of the journal. Raise InvalidRequest if the user has no home directory."""
    return state_folder("--journal") / "journal.sqlite"


class Journal(Records):
    """Records in a SQLite file.

    `owner` describes this process in the error that another lighthouse raises if it tries to use the file.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        super().__init__(_KEYS)
        self.path = Path(os.path.realpath(path))
        self._lock = FileLock(self.path, owner)
        self._db: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._is_read = False

    def claim(self) -> int:
        """Lock the file, check it and increment its term. Create the file if it is missing or empty.

        Returns:
            The new term, which is the number of times that the file was claimed.

        Raises:
            WrongState: If another process uses the file, or it is damaged. The file is unchanged.
            InvalidRequest: If the file is not a journal. It is unchanged.
        """
        with convert_errors(self.path):
            check_kind(self.path)
            make_private(self.path.parent)
            self._lock.take()
            try:
                create_if_empty(self.path)
                self.take_rows(read_rows(self.path))
                return self._open()
            except BaseException:
                self.release()
                raise

    def release(self, *, is_unused: bool = False) -> None:
        """Close and unlock the file.

        Args:
            is_unused: Whether the lighthouse failed to start. If so, delete the file if it is new and has no records.
        """
        if self._lock.is_held and self._db is not None:
            is_new = is_unused and self.term == 1 and not self._jobs and not self._runs
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
            self.term = _get_term(db, self.path) + 1
            put_row(db, _KEYS.term, str(self.term).encode())
        self._copy_log(db)
        return self.term

    def _write(self, changes: Sequence[Change]) -> None:
        with convert_errors(self.path):
            if self._db is None or not self._lock.is_held:
                raise WrongState(f"--journal: {self.path} is not claimed by this process")
            self._check_place()
            with _transaction(self._db):
                self._check_term(self._db)
                for change in changes:
                    if isinstance(change, Put):
                        put_row(self._db, change.key, change.value)
                    elif change.end is None:
                        self._db.execute("DELETE FROM record WHERE key = ?", (change.key.decode(),))
                    else:
                        ends = (change.key.decode(), change.end.decode())
                        self._db.execute("DELETE FROM record WHERE key >= ? AND key < ?", ends)
            self._copy_log(self._db)

    def _damaged(self, key: bytes, what: str) -> DamagedJournal:
        return DamagedJournal(self.path, f"{key.decode()!r} {what}")

    def _copy_log(self, db: sqlite3.Connection) -> None:
        """Copy the write-ahead log into the file and truncate it.

        If another program is reading the file, log that once. A later commit then copies the log.
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

    def _check_place(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(self.path.stat(), self._file):
                return
        raise WrongState(f"--journal: {self.path} was removed or replaced under this lighthouse; restart it")

    def _check_term(self, db: sqlite3.Connection) -> None:
        term = _get_term(db, self.path)
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
    with convert_errors(path):
        check_kind(path)
        status = path.stat()
        with contextlib.closing(connect(path, "ro")) as db:
            rows, term = _get_rows(db, path), _get_term(db, path)
            integrity = db.execute("PRAGMA quick_check").fetchone()[0]
    journal, size = Journal(path), {key: len(value) for key, value in rows}
    journal.take_rows(rows)
    runs = [(name, journal.load_run(name)) for name in sorted(journal.run_names(-1))[:ROWS_SHOWN]]
    return {
        "path": str(path),
        "bytes": status.st_size,
        "written_unix_s": status.st_mtime,
        "integrity": integrity,
        "term": term,
        "forgotten_id": journal.forgotten_id,
        "jobs": [
            {"job": job, "quorum_id": record.quorum_id, "record_bytes": size[_KEYS.job(job)]}
            for job, record in sorted(journal.load().items())[:ROWS_SHOWN]
        ],
        "runs": [
            {
                "job": name[0],
                "run": name[1],
                "is_finished": is_finished(run.record),
                "record_bytes": size[_KEYS.run(name)],
                "keys": len(run.keys),
                "value_bytes": sum(len(row[3]) for row in run.keys),
            }
            for name, run in runs
            if run is not None
        ],
    }
