"""What a journal holds, read beside the lighthouse that has it: ids and sizes, and no value of a key."""

import contextlib
import os
from pathlib import Path
from typing import Any

from lighthouse.journal import database
from lighthouse.journal.database import explained

ROWS_SHOWN = 1000


def journal_summary(path: Path) -> dict[str, Any]:
    """Of the file at `path`, which is only read. Raises WrongState or InvalidRequest that says why it cannot be."""
    path = Path(os.path.realpath(path))
    with explained(path):
        database.check_kind(path)
        status = path.stat()
        with contextlib.closing(database.connect(path, "ro")) as db:
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
