"""Interface of the store that keeps a job's quorum record and its runs, and a store in memory.

The daemon chooses a file, etcd, or, with `--journal none`, the store in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lighthouse.job.records import QuorumRecord, Row, RunName, RunRecord, SavedRun

FORGOTTEN_JOBS = 1000
"""Number of inactive jobs whose last id is kept. All others share the highest."""
FINISHED_RUNS_KEPT = 500
RUNS_KEPT = 4000


class RecordStore(Protocol):
    """Storage of quorum records, and of runs with their keys.

    One lighthouse owns it at a time. Every method may raise WrongState, InvalidRequest or NotLeader, with a remedy in
    the message.

    A commit makes its record durable before any later message leaves this process. The store writes before it returns,
    or holds messages until the write is complete (OutputGate). If it raises, the record may or may not be stored:
    commit again, or end the process.
    """

    @property
    def term(self) -> int:
        """Number that grows with each claim of the store. 0 if nothing survives the process."""
        ...

    def load(self) -> Mapping[str, QuorumRecord]:
        """Return all records by job, including forgotten jobs (quorum None)."""
        ...

    def last_id(self, job: str) -> int:
        """Return the id that all later quorum_ids of this job must exceed. 0 if nothing is known."""
        ...

    def commit(self, job: str, record: QuorumRecord) -> None: ...

    def forget(self, job: str) -> None:
        """Drop an inactive job, except for its highest id."""
        ...

    def load_run(self, name: RunName) -> SavedRun | None: ...

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        """Store a run. Drop its keys of generations below `keys_from`, and the oldest finished runs."""
        ...

    def commit_key(self, name: RunName, row: Row) -> None:
        """Store a key of a committed run."""
        ...

    def run_names(self, newest: int) -> Sequence[RunName]:
        """Return the `newest` most recent runs, the newest last."""
        ...


class MemoryStore:
    """Store that keeps runs until the process ends, and no quorum (`--journal none`)."""

    term = 0

    def __init__(self) -> None:
        self._runs: dict[RunName, SavedRun] = {}

    def claim(self) -> int:
        return 0

    def load(self) -> Mapping[str, QuorumRecord]:
        return {}

    def last_id(self, job: str) -> int:
        return 0

    def commit(self, job: str, record: QuorumRecord) -> None:
        pass

    def forget(self, job: str) -> None:
        pass

    def load_run(self, name: RunName) -> SavedRun | None:
        return self._runs.get(name)

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        old = self._runs.pop(name, SavedRun(record))
        self._runs[name] = SavedRun(record, tuple(row for row in old.keys if row[0] >= keys_from))
        while len(self._runs) > RUNS_KEPT:
            del self._runs[next(iter(self._runs))]

    def commit_key(self, name: RunName, row: Row) -> None:
        saved = self._runs[name]
        self._runs[name] = replace(saved, keys=(*(old for old in saved.keys if old[:3] != row[:3]), row))

    def run_names(self, newest: int) -> Sequence[RunName]:
        return list(self._runs)[-newest:]

    def release(self, *, is_unused: bool = False) -> None:
        pass
