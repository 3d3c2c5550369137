"""A journal's rows of runs: one a run, with its record, and one a key."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lighthouse.journal.database import Damaged, checksum
from lighthouse.runs.rules.key_space import Row
from lighthouse.runs.rules.record import RunName, RunRecord, SavedRun, dump, parse
from lighthouse.runs.store import FINISHED_RUNS_KEPT, RUNS_KEPT
from lighthouse_protocol.messages.run import KeyKind

T = TypeVar("T")

_RUN = "SELECT is_finished, CAST(record AS BLOB), checksum FROM run WHERE job = ? AND name = ?"
_KEYS = "SELECT generation, kind, name, CAST(value AS BLOB), checksum FROM run_key WHERE job = ? AND run = ?"


def check(db: sqlite3.Connection, path: Path) -> None:
    """Raises Damaged."""
    for job, run in get_names(db, -1):
        get_run(db, path, (job, run))


def get_names(db: sqlite3.Connection, newest: int) -> list[RunName]:
    """The newest last; -1: all."""
    rows = db.execute("SELECT job, name FROM run ORDER BY rowid DESC LIMIT ?", (newest,)).fetchall()
    return [(job, run) for job, run in reversed(rows)]


def get_run(db: sqlite3.Connection, path: Path, name: RunName) -> SavedRun | None:
    row = db.execute(_RUN, name).fetchone()
    if row is None:
        return None
    is_finished, raw, written = row
    if written != checksum((*name, is_finished), raw):
        raise Damaged(path, f"run {name[1]!r} of job {name[0]!r} is not what was written")
    record = _read(path, f"run {name[1]!r} of job {name[0]!r}", lambda: parse(raw))
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
    is_finished, raw = int(record.completed is not None or record.stop is not None), dump(record)
    row = (*name, is_finished, raw, checksum((*name, is_finished), raw))
    # A row that is replaced gets a new rowid: they are in the order of the last change.
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
    """Remove the oldest finished runs, and the oldest of all."""
    finished = "SELECT job, name FROM run WHERE is_finished = 1 ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    rest = "SELECT job, name FROM run ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    old = [*db.execute(finished, (FINISHED_RUNS_KEPT,)), *db.execute(rest, (RUNS_KEPT,))]
    db.executemany("DELETE FROM run WHERE job = ? AND name = ?", old)
    db.executemany("DELETE FROM run_key WHERE job = ? AND run = ?", old)
