"""What was told is remembered: the real driver, the real journal file, a virtual clock.

What is in the file is read by a connection of the test's own, at the very moment at which a message leaves.
"""

import errno
import json
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lighthouse.server.metrics import Counters
from lighthouse.server.services import LighthouseService
from lighthouse.store.sqlite import Journal
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase, Welcome
from tests.lighthouse.lives import JOB, Life, Manager, beat_for, formed
from tests.virtual_loop import VirtualLoop


def on_disk(path: Path) -> dict[str, Any]:
    """The job as the file has it, its write-ahead log left out."""
    alone = path.with_name("alone.sqlite")
    shutil.copyfile(path, alone)
    with closing(sqlite3.connect(f"{alone.as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        rows = db.execute("SELECT value FROM record WHERE key = ?", (f"/job/{JOB}",)).fetchall()
    alone.unlink()
    return json.loads(rows[0][0]) if rows else {}


def orders(manager: Manager, phase: QuorumPhase) -> list[QuorumOrder]:
    said = [m.order if isinstance(m, Welcome) else m for m in manager.heard]
    return [order for order in said if isinstance(order, QuorumOrder) and order.phase is phase]


# -- what is told after what is written


def test_a_quorum_is_in_the_file_itself_before_anybody_is_told(loop: VirtualLoop, path: Path) -> None:
    told: list[int] = []

    def heard(quorum: Quorum) -> None:
        written = on_disk(path)
        assert (written["quorum_id"], written["stands"], written["lease_s"]) == (quorum.quorum_id, True, 7.0)
        names = [row[0] for row in written["participants"]]
        assert names == [participant.replica_id for participant in quorum.participants]
        told.append(quorum.quorum_id)

    life = Life(loop, path, heard, lease_s=7.0)
    a, b = formed(life, "ab")
    b.close()
    a.join()
    beat_for(loop, [a], 1)
    assert len(set(told)) == 2
    life.die()


def test_a_longer_lease_is_written_before_it_is_told(
    loop: VirtualLoop, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(loop, path, lease_s=5.0)
    a, b = formed(life, "ab")
    life.die()
    life = Life(loop, path, lease_s=60.0)
    leases: list[float] = []
    keep = Manager.send

    def send(self: Manager, message: bytes) -> None:
        leases.append(on_disk(path)["lease_s"])
        keep(self, message)

    monkeypatch.setattr(Manager, "send", send)
    a.connect(life), b.connect(life)  # pyright: ignore[reportUnusedExpression]
    assert leases
    assert set(leases) == {60.0}
    life.die()


# -- a start with a journal


def test_after_a_restart_a_new_quorum_has_a_new_id(loop: VirtualLoop, path: Path) -> None:
    """Also where the wall clock has gone back meanwhile."""
    life = Life(loop, path)
    a, b = formed(life, "ab")
    first = a.quorum_id
    life.die()
    life = Life(loop, path, wall_ms=1000)
    beat_for(loop, [a.connect(life), b.connect(life)], 1)
    b.close()
    beat_for(loop, [a], 1)
    a.join()
    assert a.quorum_id == first + 1
    life.die()


@pytest.mark.parametrize(("recorded_s", "own_s"), [(40.0, 5.0), (5.0, 40.0)])
def test_the_wait_is_for_the_longer_lease(loop: VirtualLoop, path: Path, recorded_s: float, own_s: float) -> None:
    """Holders that do not come back may go on for as long as they were promised, and as this life may promise."""
    life = Life(loop, path, lease_s=recorded_s)
    formed(life, "ab")
    life.die()
    died_at = loop.now
    life = Life(loop, path, lease_s=own_s)
    c = Manager("c").connect(life)
    c.join()
    beat_for(loop, [c], 39)
    assert c.quorum is None
    beat_for(loop, [c], 2)
    assert c.quorum is not None
    assert loop.now >= died_at + 40
    life.die()


def test_after_a_restart_holders_that_come_back_and_go_still_have_their_lease(loop: VirtualLoop, path: Path) -> None:
    """A newcomer must not form beside those who may still grant: their lease counts from the start."""
    life = Life(loop, path, lease_s=30.0)
    a, b = formed(life, "ab")
    life.die()
    started_at = loop.now
    life = Life(loop, path, lease_s=5.0)
    a.connect(life).close()  # it is back for a moment: that says nothing of its lease but that it had one
    b.cut()
    c = Manager("c").connect(life)
    c.join()
    beat_for(loop, [c], 29)
    assert c.quorum is None
    beat_for(loop, [c], 2)
    assert c.quorum is not None
    assert loop.now >= started_at + 30
    life.die()


def test_a_pause_of_the_lighthouse_moves_the_return(loop: VirtualLoop, path: Path) -> None:
    """Nobody could come back while it stood still: the quorum stands again when they do."""
    life = Life(loop, path, lease_s=10.0)
    a, b = formed(life, "ab")
    first = a.quorum_id
    life.die()
    life = Life(loop, path, lease_s=10.0)
    a.connect(life)
    beat_for(loop, [a], 2)
    loop.now += 30.0  # no timer fires, no message is read
    a.beat()
    b.connect(life)
    beat_for(loop, [a, b], 1)
    assert life.driver.status().phase == "standing"
    assert (a.quorum_id, b.quorum_id) == (first, first)
    assert not orders(a, QuorumPhase.REVOKED)
    life.die()


# -- a journal that is older than what was told


def copied(path: Path) -> Path:
    copy = path.with_name("copy.sqlite")
    shutil.copyfile(path, copy)
    return copy


def test_no_id_is_named_again_by_a_copy_of_an_earlier_moment(loop: VirtualLoop, path: Path) -> None:
    """The review's d2: the only witness of the later quorum is not there to tell."""
    life = Life(loop, path)
    a, b = formed(life, "ab")
    copy = copied(path)
    b.close()
    a.join()
    beat_for(loop, [a], 1)
    life.die()
    shutil.copyfile(copy, path)
    loop.go(10)
    life = Life(loop, path)
    [c] = formed(life, "c")
    assert c.quorum_id > a.quorum_id
    life.die()


def test_a_member_that_knows_a_later_quorum_shows_that_the_journal_is_older(
    loop: VirtualLoop, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal says {a, b}; {c, d} may hold a later quorum, and are cut off. a alone must not form beside them."""
    life = Life(loop, path, lease_s=20.0)
    a, b = formed(life, "ab")
    copy, old = copied(path), a.quorum_id
    life.die()
    shutil.copyfile(copy, path)
    life = Life(loop, path, lease_s=20.0)
    started_at = loop.now
    a.seen, a.held, b.held = old + 2, None, None
    with caplog.at_level(logging.WARNING):
        a.connect(life), b.connect(life)  # pyright: ignore[reportUnusedExpression]
        a.join(), b.join()  # pyright: ignore[reportUnusedExpression]
    [text] = [r.getMessage() for r in caplog.records if "the journal is outdated" in r.getMessage()]
    assert f"a has seen quorum {old + 2}, but the newest one in the journal is {old}" in text
    assert "No quorum forms for 20.0 s" in text
    beat_for(loop, [a, b], 19)
    assert (a.quorum_id, b.quorum_id) == (old, old)
    beat_for(loop, [a, b], 2)
    assert a.quorum_id == b.quorum_id > old + 2
    assert loop.now >= started_at + 20
    life.die()


def test_a_quorum_that_stands_again_by_an_older_journal_is_revoked(loop: VirtualLoop, path: Path) -> None:
    life = Life(loop, path, lease_s=20.0)
    a, b = formed(life, "ab")
    old = a.quorum_id
    life.die()
    life = Life(loop, path, lease_s=20.0)
    beat_for(loop, [a.connect(life), b.connect(life)], 1)
    assert life.driver.status().phase == "standing"
    Manager("c", seen=old + 5).connect(life)
    for manager in (a, b):
        [order] = orders(manager, QuorumPhase.REVOKED)
        assert f"c was told quorum {old + 5}, which is not remembered" in order.reason
    life.die()


# -- full disks, and files that are gone


def test_a_reader_of_the_file_costs_a_warning_and_no_commit(
    loop: VirtualLoop, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(loop, path)
    a, b = formed(life, "ab")
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM record").fetchall()
        b.close()
        a.join()
        beat_for(loop, [a], 1)
        assert f"another process has {path} open" in caplog.text
    assert a.quorum is not None
    assert [p.replica_id for p in a.quorum.participants] == ["a"]
    assert life.gave_up == []
    life.die()


@pytest.mark.parametrize("what", ["full", "full after a pause", "replaced"])
def test_a_journal_that_cannot_be_written_ends_the_lighthouse_with_one_line(
    loop: VirtualLoop, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Also where a timer finds it out, which has no caller that could be told."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    life = Life(loop, path, lease_s=2.0, join_timeout_s=3.0)
    a = Manager("a").connect(life)
    if is_paused := what == "full after a pause":
        Manager("b").connect(life)  # it is waited for
        loop.go(2)
    a.join()  # it forms when the lease of earlier lives is over
    loop.now += 4.0 * is_paused
    if what.startswith("full"):
        monkeypatch.setattr(Journal, "_check_term", full)
    else:
        path.rename(path.with_name("away"))
    loop.go(3)
    assert life.gave_up == [1]
    assert a.quorum is None
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.startswith(f"shutting down: cannot write the journal: --journal: {path}")
    assert ("free space on its disk" if what.startswith("full") else "restart it") in line
    life.die()


def test_a_look_at_the_status_that_finds_the_disk_full_is_answered(
    loop: VirtualLoop, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets a job that has gone quiet, of which nothing is told: the lighthouse goes on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    life = Life(loop, path, lease_s=2.0)
    [a] = formed(life, "a")
    last_id = a.quorum_id
    a.close()
    loop.go(100)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_check_term", full)
        assert LighthouseService(life.jobs, Counters()).status().jobs == ()
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"cannot remove the inactive job {JOB} from the journal: --journal: {path}")
    assert life.memory.load()[JOB].quorum_id == last_id
    [again] = formed(life, "a")
    assert again.quorum_id > last_id
    assert life.gave_up == []
    life.die()
