"""Runs in the journal: what was committed is there again, with its keys; what is damaged is named; the oldest go."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lighthouse.journal import database, run_rows
from lighthouse.journal.journal import Journal
from lighthouse.runs.rules.record import Former, RestartRecord, RunRecord, SavedRun, SupervisorRecord
from lighthouse.runs.store import RunStore, RunStoreInProcess
from lighthouse_protocol.messages.run import Generation, KeyKind, RankId, RunCounters, RunStopped, RunTerms
from lighthouse_protocol.messages.run_status import ExcludedHost
from lighthouse_protocol.messages.supervisor import ProcessLost, SupervisorHello
from lighthouse_protocol.refusals import WrongState
from tests.lighthouse.journal.test_journal import claimed

A, B = RankId(0, "a"), RankId(1, "b")
FULL = RunRecord(
    counters=RunCounters(3, 0, 2, 1),
    terms=RunTerms(4, active=2, stride=100),
    generation=Generation((A, B), RunCounters(3)),
    is_broken=True,
    formed=4,
    stop=RunStopped("enough", "operator", 3),
    restarts=(RestartRecord(2, "x", 1.5, "i", (A,), 3, 2.5, 3.5, (ProcessLost(A, "y", ("l",)),)),),
    ending={"s": "enough"},
    finished=(B,),
    completed=3,
    supervisors=(SupervisorRecord(SupervisorHello("g", "2", "h", (0, 1)), ("1",)),),
    excluded=(ExcludedHost("h7", "broken", 5.0),),
    former=Former(1, ("old",)),
)
RUN = ("job", "run")


def test_what_was_committed_is_there_again(path: Path):
    with claimed(path) as journal:
        assert journal.load_run(RUN) is None
        journal.commit_run(RUN, FULL, 0)
        journal.commit_run(("job", "other"), RunRecord(), 0)
    with claimed(path) as journal:
        assert journal.load_run(RUN) == SavedRun(FULL)
        assert journal.load_run(("other", "run")) is None
        assert journal.run_names(10) == [RUN, ("job", "other")]
        assert journal.run_names(1) == [("job", "other")]


@pytest.mark.parametrize("is_file", [True, False])
def test_keys_are_kept_and_old_spaces_go(path: Path, is_file: bool):
    def use(memory: RunStore) -> None:
        memory.commit_run(RUN, FULL, 0)
        memory.commit_key(RUN, (2, KeyKind.ITERATION, "a", b"1"))
        memory.commit_key(RUN, (3, KeyKind.ITERATION, "a", b"2"))
        memory.commit_key(RUN, (3, KeyKind.ITERATION, "a", b"3"))
        memory.commit_run(RUN, FULL, 3)
        saved = memory.load_run(RUN)
        assert saved is not None
        assert saved.keys == ((3, KeyKind.ITERATION, "a", b"3"),)

    if is_file:
        with claimed(path) as journal:
            use(journal)
    else:
        use(RunStoreInProcess())


def test_the_oldest_finished_runs_go_first(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_rows, "FINISHED_RUNS_KEPT", 2)
    monkeypatch.setattr(run_rows, "RUNS_KEPT", 4)
    with claimed(path) as journal:
        for number in range(4):
            journal.commit_run(("job", f"finished{number}"), FULL, 0)
            journal.commit_key(("job", f"finished{number}"), (3, KeyKind.ITERATION, "a", b"1"))
        assert [run for _, run in journal.run_names(-1)] == ["finished2", "finished3"]
        for number in range(4):
            journal.commit_run(("job", f"open{number}"), RunRecord(), 0)
        assert [run for _, run in journal.run_names(-1)] == [f"open{number}" for number in range(4)]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM run_key").fetchone() == (0,)


def test_an_older_lighthouse_may_not_write(path: Path):
    with claimed(path) as journal:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            database.put_head(db, database.Head(9, 0))
        with pytest.raises(WrongState, match="taken over by another lighthouse"):
            journal.commit_run(RUN, FULL, 0)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE run SET record = '{}'",
        "UPDATE run SET is_finished = 0",
        "UPDATE run SET name = 'other'",
        "UPDATE run_key SET value = '2'",
        "UPDATE run_key SET generation = 4",
    ],
)
def test_what_is_damaged_is_named_and_left_as_it_is(path: Path, damage: str):
    with claimed(path) as journal:
        journal.commit_run(RUN, FULL, 0)
        journal.commit_key(RUN, (3, KeyKind.ITERATION, "a", b"1"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    before = path.read_bytes()
    moved = "name = 'other'" in damage
    with pytest.raises(WrongState, match="is damaged") as caught:
        Journal(path).claim()
    assert ("other" if moved else "run") in str(caught.value)
    assert path.read_bytes() == before
