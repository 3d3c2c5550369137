"""A job is forgotten when nothing of it can go on, and not before."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse.job import registry
from lighthouse.store.sqlite import Journal
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.session import HeldQuorum, HoldState, Leave, QuorumPhase, Welcome
from lighthouse_protocol.refusals import LimitReached
from tests.lighthouse.builders import ticked
from tests.lighthouse.lives import JOB, Life, Manager, beat_for, formed
from tests.lighthouse.sessions import ended, standing
from tests.virtual_loop import VirtualLoop


def test_a_machine_is_not_quiet_while_a_lease_of_its_members_may_run() -> None:
    machine = standing("ab", lease_s=150.0)
    for number in (1, 2):
        machine.handle(ended(number), 9)
    ticked(machine, 9, 149)
    assert len(machine.job.groups) == 0
    assert not machine.is_quiet(149.9)
    assert machine.is_quiet(150)


def test_two_quorums_never_commit_side_by_side_under_a_long_lease(loop: VirtualLoop, tmp_path: Path) -> None:
    """The review's d4: a and b grant steps until 0.8 x 150 s after their last echo, and c had formed long before."""
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path, lease_s=150.0)
    a, b = formed(life, "ab")
    beat_for(loop, [a, b], 9)
    leased_until = loop.now + 150
    a.cut(), b.cut()  # pyright: ignore[reportUnusedExpression]
    loop.go(100)
    life.scrape()
    assert life.memory.load()[JOB].stands, "the journal has forgotten what may still be held"
    c = Manager("c").connect(life)
    c.join()
    while loop.now < leased_until - 1:
        loop.go(1)
        c.beat()
        life.scrape()
        assert c.quorum is None
    beat_for(loop, [c], 2)
    assert c.quorum_id > a.quorum_id
    life.die()


def test_the_first_that_comes_back_too_late_is_told_what_became_of_its_quorum(
    loop: VirtualLoop, tmp_path: Path
) -> None:
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path)
    [a, _] = formed(life, "ab")
    life.die()
    again = Life(loop, path)
    loop.go(12)
    a.connect(again)
    [welcome] = [message for message in a.heard if isinstance(message, Welcome)][1:]
    assert welcome.order is not None
    assert (welcome.order.quorum_id, welcome.order.phase) == (a.quorum_id, QuorumPhase.REVOKED)
    assert welcome.order.reason == "not reconnected within the lease: a, b"
    again.die()


def test_a_job_that_has_gone_quiet_is_forgotten_but_for_its_last_id(loop: VirtualLoop, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path)
    [a] = formed(life, "a")
    a.close()
    loop.go(100)
    life.scrape()
    assert list(life.jobs) == []
    life.die()
    journal = Journal(path)
    journal.claim()
    assert (journal.load()[JOB].quorum, journal.last_id(JOB)) == (None, a.quorum_id)
    journal.release()


def test_a_job_that_no_group_joins_after_a_restart_is_forgotten_too(loop: VirtualLoop, tmp_path: Path) -> None:
    """Ranks of a run have made it."""
    life = Life(loop, tmp_path / "journal.sqlite")
    assert life.driver.status().phase == "returning"
    loop.go(10)
    life.scrape()
    assert list(life.jobs) == []
    life.die()


def test_nor_is_one_kept_that_ranks_have_made_after_the_leases(loop: VirtualLoop, tmp_path: Path) -> None:
    """Its quorum stood when the lighthouse died, and none of its groups came back."""
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path)
    formed(life, "ab")
    life.die()
    again = Life(loop, path)
    loop.go(12)
    assert again.driver.status().phase == "revoked"
    again.scrape()
    assert list(again.jobs) == []
    again.die()


def test_the_record_of_a_job_that_nobody_uses_any_more_is_removed_after_a_week(
    loop: VirtualLoop, tmp_path: Path
) -> None:
    """Its lighthouse died before it could remove the record. The last id stays."""
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path)
    [a] = formed(life, "a")
    life.die()
    again = Life(loop, path)
    loop.go(7 * 86400 - 1)
    again.scrape()
    assert again.memory.load()[JOB].quorum is not None
    loop.go(2)
    again.scrape()
    assert (again.memory.load()[JOB].quorum, again.memory.last_id(JOB)) == (None, a.quorum_id)
    again.die()


def test_a_job_that_ended_in_an_earlier_leadership_is_shown_no_more(loop: VirtualLoop) -> None:
    """Another leader may have seen it go on since."""
    life = Life(loop, None)
    [a] = formed(life, "a")
    a.held = HeldQuorum(a.quorum_id, HoldState.LEAVING, 3)
    a.beat()
    a.close()
    loop.go(100)
    life.scrape()
    assert [status.job for status in life.jobs.ended_jobs("")] == [JOB]
    life.jobs.drop_all("another lighthouse leads")
    life.jobs.load_records({})
    assert life.jobs.ended_jobs("") == ()
    life.die()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lease_s=st.sampled_from([1.0, 5.0, 40.0, 61.0, 90.0, 400.0]),
    heartbeat_timeout_s=st.sampled_from([1.0, 5.0, 30.0]),
    worked_s=st.integers(0, 20),
    away_s=st.floats(0, 500),
    scrape_every_s=st.sampled_from([1.0, 7.0, 30.0]),
    says_goodbye=st.booleans(),
)
def test_nothing_forms_beside_a_lease_whatever_is_forgotten(
    loop: VirtualLoop,
    lease_s: float,
    heartbeat_timeout_s: float,
    worked_s: int,
    away_s: float,
    scrape_every_s: float,
    says_goodbye: bool,
) -> None:
    life = Life(loop, None, lease_s=lease_s, heartbeat_timeout_s=heartbeat_timeout_s)
    a, b = formed(life, "ab")
    beat_for(loop, [a, b], worked_s)
    leased_until = loop.now + lease_s
    for manager in (a, b):
        manager.close() if says_goodbye else manager.cut()
    ends_at = loop.now + away_s
    while loop.now < ends_at:
        loop.go(min(scrape_every_s, ends_at - loop.now))
        life.scrape()
    c = Manager("c").connect(life)
    c.join()
    while c.quorum is None:
        life.scrape()
        loop.go(0.5)
        c.beat()
    assert loop.now >= leased_until
    assert c.quorum_id > a.quorum_id
    life.die()


class TestReportedJobs:
    """Jobs of which only heartbeats without a session have come: anyone can send these, under any name."""

    def test_they_keep_no_other_job_out(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "MAX_JOBS", 2)
        monkeypatch.setattr(registry, "MAX_REPORTED_JOBS", 3)
        life = Life(loop, None)
        for number in range(3):
            life.jobs.get_reported(f"r{number}").receive_heartbeat_call("a", "i1")
        with pytest.raises(LimitReached, match="^job: r3 has only sent heartbeats, as 3 other jobs have; request"):
            life.jobs.get_reported("r3")
        known = life.jobs.get_reported("r0")
        assert life.jobs.get_job("r0") is known, "now it counts as the others do"
        life.jobs.get_job("honest")
        with pytest.raises(LimitReached, match="^job: one_more would be number 3; the lighthouse takes 2 at once"):
            life.jobs.get_job("one_more")
        life.jobs.get_reported("r3").receive_heartbeat_call("a", "i1")
        life.die()

    def test_one_that_has_gone_quiet_makes_room(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "MAX_REPORTED_JOBS", 1)
        life = Life(loop, None)
        life.jobs.get_reported("r0").receive_heartbeat_call("a", "i1")
        loop.go(100)
        life.jobs.get_reported("r1")
        assert [driver.job for driver in life.jobs] == ["r1"]
        life.die()

    def test_those_of_an_earlier_leadership_take_no_room(
        self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "MAX_REPORTED_JOBS", 2)
        monkeypatch.setattr(registry, "MAX_JOBS", 1)
        life = Life(loop, None)
        for name in ("r0", "r1"):
            life.jobs.get_reported(name).receive_heartbeat_call("a", "i1")
        life.jobs.drop_all("another lighthouse leads")
        life.jobs.load_records({})
        life.jobs.get_reported("r2").receive_heartbeat_call("a", "i1")
        life.jobs.get_job("honest")
        with pytest.raises(LimitReached, match="^job: one_more would be number 2"):
            life.jobs.get_job("one_more")
        life.die()

    def test_what_is_quiet_is_not_looked_for_at_every_refusal(
        self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "MAX_REPORTED_JOBS", 1)
        life = Life(loop, None)
        life.jobs.get_reported("r0").receive_heartbeat_call("a", "i1")
        looked: list[float] = []
        monkeypatch.setattr(life.jobs, "forget_quiet", lambda *, is_full: looked.append(loop.now))
        for _ in range(10):
            with pytest.raises(LimitReached):
                life.jobs.get_reported("r1")
        assert len(looked) == 1
        life.die()


def test_what_is_quiet_goes_although_nobody_asks_for_the_status(loop: VirtualLoop) -> None:
    life = Life(loop, None)
    life.jobs.get_reported("r0").receive_heartbeat_call("a", "i1")
    run = life.jobs.runs.get_run_driver("j", "quiet")
    life.jobs.take_samples()
    assert [driver.job for driver in life.jobs] == ["r0"]
    assert run not in life.jobs.runs
    loop.go(100)
    life.jobs.take_samples()
    assert list(life.jobs) == []
    life.die()


def test_the_end_of_a_job_ends_its_incidents_and_the_time_of_its_lost_groups(loop: VirtualLoop) -> None:
    life = Life(loop, None)
    a, b = formed(life, "ab")
    a.step = 5
    b.close()
    beat_for(loop, [a], 8)
    a.held = None
    a.join()
    beat_for(loop, [a], 8)
    assert [incident.kind for incident in life.jobs.incidents.archive.summaries()] == [IncidentKind.LOSS]
    a.held = HeldQuorum(a.quorum_id, HoldState.LEAVING, 5)
    a.beat()
    life.driver.receive_from_manager(a.session, Leave("done"))
    a.close()
    assert life.driver.machine.job_end.step == 6
    life.jobs.incidents.ledger.take_lines(loop.now, 0.0)
    loop.go(3600)
    [c] = formed(life, "c")
    c.held = HeldQuorum(c.quorum_id, HoldState.STANDING, 50)
    c.beat()
    [incident] = life.jobs.incidents.archive.summaries()
    assert incident.step_s is not None
    assert incident.step_s < 60
    loop.go(1)
    lines = map(json.loads, life.jobs.incidents.ledger.take_lines(loop.now, 0.0))
    assert {line["group"] for line in lines} == {"c"}
    life.die()


def test_a_job_without_a_row_is_forgotten_without_a_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.claim()
    before = path.stat().st_mtime_ns
    journal.forget("never written down")
    assert path.stat().st_mtime_ns == before
    journal.release()
