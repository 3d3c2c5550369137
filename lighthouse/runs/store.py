"""What is kept of runs over a restart, and the narrow interface to where: a file (journal.py), or this process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from lighthouse.runs.rules.key_space import Row
from lighthouse.runs.rules.record import RunName, RunRecord, SavedRun

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
