"""Where a job's records are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lighthouse.job.records import QuorumRecord, Row, RunName, RunRecord, SavedRun

FORGOTTEN_JOBS = 1000
"""Of so many jobs that have gone quiet the last ids are kept one by one; of all others, the highest."""


class JobStore(Protocol):
    """Where records are kept: a file (journal/journal.py), etcd (etcd/store.py), nowhere (NoJobStore).

    One lighthouse has it at a time. Every method may raise WrongState, InvalidRequest or NotLeader that names what to
    do, without it too.
    """

    def load(self) -> Mapping[str, QuorumRecord]:
        """All records by job, the forgotten ones (quorum None) too."""
        ...

    def last_id(self, job: str) -> int:
        """Every quorum_id of this job from here on must be higher; 0 where nothing is known."""
        ...

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Nothing that is said from here on leaves this process before the record is durable: it is when this returns,
        or what is said is held until then (OutputGate). When it raises, the record may have been kept or not; commit
        again, or end."""
        ...

    def forget(self, job: str) -> None:
        """A job that has gone quiet: only its highest id is kept."""
        ...


class NoJobStore:
    """Keeps nothing: `--journal none`."""

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

    def release(self, *, is_unused: bool = False) -> None:
        pass


# -- store --------------------------------------------------------------------
#
# What is kept of runs over a restart, and the narrow interface to where: a file (journal.py), or this process.

FINISHED_RUNS_KEPT = 500
RUNS_KEPT = 4000


class RunStore(Protocol):
    """Every method may raise WrongState that names what to do."""

    @property
    def term(self) -> int:
        """It grows each time that a lighthouse claims what is kept; 0: nothing is kept over its end."""
        ...

    def load_run(self, name: RunName) -> SavedRun | None: ...

    def commit_run(self, name: RunName, record: RunRecord, keys_from: int) -> None:
        """Durable before anything that is said after it, as JobStore.commit. Keys of generations below `keys_from` are
        dropped, and the oldest finished runs."""
        ...

    def commit_key(self, name: RunName, row: Row) -> None:
        """Of a run that was committed; durable before anything that is said after it."""
        ...

    def run_names(self, newest: int) -> Sequence[RunName]:
        """The newest last."""
        ...


class RunStoreInProcess:
    """`--journal none`: a run is kept as long as the lighthouse lives."""

    term = 0

    def __init__(self) -> None:
        self._runs: dict[RunName, SavedRun] = {}

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
