"""The records of jobs and runs as a SQLite file. Rules:

- One lighthouse has it (file_lock.py), and every change checks that the term is still its own: should two come to
  hold it all the same (a lock file removed by hand), the older one is refused.
- WAL and synchronous=FULL: a commit has reached the disk before it returns. It is in the file itself by then, not
  in the write-ahead log alone, so a log that is lost or torn holds nothing that was told.
- One row per run, and one per key of a run (run_rows.py).
- One row per job. The row of a forgotten job keeps its id alone. The newest FORGOTTEN_JOBS of these are kept; the ids
  of all others are covered by one number, and every job without a row begins above that.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lighthouse.journal import database, run_rows
from lighthouse.journal.database import explained
from lighthouse.journal.file_lock import FileLock
from lighthouse.quorum.rules.record import QuorumRecord
from lighthouse.quorum.store import FORGOTTEN_JOBS
from lighthouse.runs.rules.key_space import Row
from lighthouse.runs.rules.record import RunName, RunRecord, SavedRun
from lighthouse_protocol.refusals import WrongState
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.state_folder import make_private, state_folder

log = logging.getLogger(__name__)


def default_path() -> Path:
    """Raises InvalidRequest."""
    return state_folder("--journal") / "journal.sqlite"


class Journal:
    """A JobStore, and a RunStore.

    `owner` is what another lighthouse is told of the holder, for example the address it listens on.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path = Path(os.path.realpath(path))
        self.term = 0
        self._lock = FileLock(self.path, owner)
        self._db: sqlite3.Connection | None = None
        self._file: os.stat_result | None = None
        self._is_read = False

    def claim(self) -> int:
        """Take the file, making it if it is absent or empty; return the term.

        Raises WrongState or InvalidRequest that names the file and what to do, and then has not changed it.
        """
        with explained(self.path):
            database.check_kind(self.path)
            make_private(self.path.parent)
            self._lock.take()
            try:
                database.create_if_empty(self.path)
                database.check(self.path, run_rows.check)
                return self._open()
            except BaseException:
                self.release()
                raise

    def load(self) -> Mapping[str, QuorumRecord]:
        with explained(self.path):
            return database.get_records(self._opened(), self.path)

    def last_id(self, job: str) -> int:
        with explained(self.path):
            db = self._opened()
            quorum_id = database.get_id(db, job)
            return database.get_head(db, self.path).forgotten_id if quorum_id is None else quorum_id

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Also raises ValueError for an id below the job's last."""
        with self._change() as db:
            last_id = database.get_id(db, job)
            if last_id is not None and record.quorum_id < last_id:
                raise ValueError(f"{job} named quorum {last_id}; its ids must not go back to {record.quorum_id}")
            database.put_record(db, job, record)

    def forget(self, job: str) -> None:
        """Nothing is written of a job that has no row."""
        with explained(self.path):
            last_id = database.get_id(self._opened(), job)
        if last_id is None:
            return
        with self._change() as db:
            database.put_forgotten(db, job, last_id)
            self._thin_out(db)

    # -- runs

    def load_run(self, name: RunName) -> SavedRun | None:
        with explained(self.path):
            return run_rows.get_run(self._opened(), self.path, name)

    def run_names(self, newest: int) -> Sequence[RunName]:
        with explained(self.path):
            return run_rows.get_names(self._opened(), newest)

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        with self._change() as db:
            run_rows.put_run(db, name, record, keys_from)

    def commit_key(self, name: RunName, row: Row) -> None:
        with self._change() as db:
            run_rows.put_key(db, name, row)

    # -- the claim

    def release(self, *, is_unused: bool = False) -> None:
        """`is_unused`: the start has failed. A file that was made for it, and holds nothing, is removed."""
        if self._lock.is_held and self._db is not None:
            is_new = is_unused and self.term == 1 and not database.has_rows(self._db)
            self._db.close()
            self._db = None
            if is_new:
                with contextlib.suppress(OSError):
                    self.path.unlink()
        self._lock.drop()

    def _open(self) -> int:
        self._db = db = database.connect(self.path, "rw")
        self._file = self.path.stat()
        db.execute("PRAGMA synchronous = FULL")
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise WrongState(f"--journal: {self.path} cannot be kept in WAL mode ({mode}); name one on a local disk")
        with _transaction(db):
            head = database.get_head(db, self.path)
            database.put_head(db, replace(head, term=head.term + 1))
        self._copy_log(db)
        self.term = head.term + 1
        return self.term

    def _thin_out(self, db: sqlite3.Connection) -> None:
        ids = database.pop_forgotten(db, FORGOTTEN_JOBS)
        if ids:
            head = database.get_head(db, self.path)
            database.put_head(db, replace(head, forgotten_id=max(head.forgotten_id, *ids)))

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
        """Into the file, and empty it. A program that reads the file can hold that up until a later commit."""
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
        term = database.get_head(db, self.path).term
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
