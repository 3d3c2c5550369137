"""Interface to the store that keeps the quorum records and runs of all jobs, and an in-memory implementation.

The daemon uses a file, etcd or, with `--journal none`, the in-memory store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lighthouse.job.records import QuorumRecord, Row, RunName, RunRecord, SavedRun

FORGOTTEN_JOBS = 1000
"""Number of inactive jobs for which the last quorum_id is kept. Of all older ones, only the highest id is kept."""
FINISHED_RUNS_KEPT = 500
RUNS_KEPT = 4000


class RecordStore(Protocol):
    """Storage of quorum records, and of runs with their keys.

    Only one lighthouse at a time owns the store. Every method may raise WrongState, InvalidRequest or NotLeader, with a
    remedy in the message.

    A commit makes its record durable before any later message leaves this process: the store either writes before it
    returns, or holds messages back until the write is complete (OutputGate). If a commit raises, the record may or may
    not have been stored. The caller must then commit again or exit the process.
    """

    @property
    def term(self) -> int:
        """Number that grows each time the store is claimed. It is 0 if no record survives the process."""
        ...

    def load(self) -> Mapping[str, QuorumRecord]:
        """Return the records of all jobs, by job. A forgotten job has a record without a quorum."""
        ...

    def last_id(self, job: str) -> int:
        """Return the highest quorum_id that the job may have used, or 0 if none is known. Later ids must exceed it."""
        ...

    def commit(self, job: str, record: QuorumRecord) -> None: ...

    def forget(self, job: str) -> None:
        """Drop the record of an inactive job, except for its highest quorum_id."""
        ...

    def load_run(self, name: RunName) -> SavedRun | None: ...

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        """Store a run. Drop its keys of generations below `keys_from`, and the oldest finished runs."""
        ...

    def commit_key(self, name: RunName, row: Row) -> None:
        """Store one key of a run that has been committed before."""
        ...

    def run_names(self, newest: int) -> Sequence[RunName]:
        """Return the names of the `newest` most recent runs, ending with the most recent."""
        ...


class MemoryStore:
    """In-memory store (`--journal none`). It keeps runs until the process exits, and does not keep quorums."""

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
