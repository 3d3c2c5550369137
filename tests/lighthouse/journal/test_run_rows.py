"""Runs in the journal: what was committed is there again, with its keys; what is damaged is named; the oldest go."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lighthouse.job.records import Former, RestartRecord, RunRecord, SupervisorRecord
from lighthouse.job.store import MemoryStore
from lighthouse.store import sqlite as database
from lighthouse.store.sqlite import Journal
from lighthouse_protocol.messages.run import (
    ExcludedHost,
    Generation,
    KeyKind,
    ProcessLost,
    RankId,
    RunCounters,
    RunStopped,
    RunTerms,
    SupervisorHello,
)
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


def test_a_run_in_this_process_keeps_its_keys_and_old_spaces_go() -> None:
    memory = MemoryStore()
    memory.commit_run(RUN, FULL, 0)
    for generation, value in ((2, b"1"), (3, b"2"), (3, b"3")):
        memory.commit_key(RUN, (generation, KeyKind.ITERATION, "a", value))
    memory.commit_run(RUN, FULL, 3)
    saved = memory.load_run(RUN)
    assert saved is not None
    assert saved.keys == ((3, KeyKind.ITERATION, "a", b"3"),)


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
