"""Groups that catch up, under real daemons: nobody waits for them, and they end with the same bits. Each way to train,
also those that cannot be followed: test_training_kinds.py."""

import math
import re

import pytest

from tests.agent_client.matrix_events import Cell, finish
from tests.agent_client.test_training_kinds import GIVEN_UP
from tests.agent_client.training_jobs import Group, MakeJob, TrainingJob
from tests.agent_client.training_kinds import ClippedByNorm, Ddp, Hsdp, ScaledLater, Scheduled
from tests.processes import PATIENCE_S, eventually

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
PACE_S = 0.02
RESTS_S = 12.0

pytestmark = pytest.mark.timeout(300)


def add_late(job: TrainingJob, late: Group) -> None:
    """It follows, and waits for its snapshot."""
    job.build(late)
    for rank in late.ranks:
        rank.call("follow_for", math.inf)
    job.train(late, pace_s=PACE_S)
    for number in range(job.ranks):
        wait_follows(job, late, 3, number)


def wait_follows(job: TrainingJob, group: Group, more: int, rank: int = 0) -> None:
    before = len(job.events(group, rank, "follows"))
    eventually(lambda: len(job.events(group, rank, "follows")) >= before + more, f"{group.name} follows", PATIENCE_S)


def two_and_a_late_one(make_job: MakeJob, kind: type[Ddp]) -> tuple[TrainingJob, Group, Group, Group]:
    job = make_job(kind, heal_mode="catch_up")
    a, b, late = job.all_groups("a", "b", "c")
    job.start(a, b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    add_late(job, late)
    return job, a, b, late


def arrive(job: TrainingJob, late: Group, *others: Group, way: str = "", is_lossless: bool = True) -> None:
    """It gets its snapshot, and counts again; nobody has lost a step, where that is so."""
    for rank in late.ranks:
        rank.call("allow_fetch")
    job.wait_steps(late, *others, more=5, participants=1 + len(others))
    assert job.committed(late)[-1]["participated"]
    cell = Cell(way, job)
    finish(cell, [late, *others])
    assert cell.discards(late, *others) == 0 or not is_lossless


def test_the_others_go_on_while_it_fetches_and_it_gets_there(make_job: MakeJob) -> None:
    job, a, b, c = two_and_a_late_one(make_job, Ddp)
    wait_follows(job, c, 10)
    assert not any(event["participated"] for event in job.events(c, kind="follows"))
    job.wait_steps(a, b, more=10, participants=3)
    arrive(job, c, a, b)


@pytest.mark.slow
def test_a_sharded_group_catches_up(make_job: MakeJob) -> None:
    """FSDP2 over two ranks. The other group commits meanwhile, and loses no step."""
    job = make_job(Hsdp, ranks=2, heal_mode="catch_up")
    a, c = job.all_groups("a", "c")
    job.start(a, pace_s=PACE_S)
    job.wait_steps(a, more=3, participants=1)
    add_late(job, c)
    job.wait_steps(a, more=10, participants=2)
    arrive(job, c, a, way="hsdp")
    for rank in range(2):
        assert "caught up at step" in job.log_of(c, rank)
        assert "healing from" not in job.log_of(c, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "sources"), [(0, ["a", "b"]), (1, ["a"])], ids=["its source", "another group"])
def test_a_group_dies_and_it_goes_on_with_what_it_still_gets(
    make_job: MakeJob, victim: int, sources: list[str]
) -> None:
    job, *others, c = two_and_a_late_one(make_job, Ddp)
    others.pop(victim).kill()
    job.wait_steps(*others, more=3, participants=2)
    c.ranks[0].call("allow_fetch")
    job.wait_steps(c, *others, more=5, participants=2)
    assert re.findall(r"catching up from (\w+) at", job.log_of(c)) == sources
    finish(Cell("", job), [c, *others])


@pytest.mark.slow
def test_two_catch_up_at_once(make_job: MakeJob) -> None:
    job, a, b, c = two_and_a_late_one(make_job, Ddp)
    d = job.group("d")
    add_late(job, d)
    c.ranks[0].call("allow_fetch")
    job.wait_steps(c, more=3, participants=4)
    wait_follows(job, d, 3)
    arrive(job, d, a, b, c)
    assert [len(re.findall(r"catching up from \w+ at", job.log_of(late))) for late in (c, d)] == [1, 1]


@pytest.mark.slow
def test_all_others_die_and_it_goes_on_from_what_it_holds(make_job: MakeJob) -> None:
    job, *others, c = two_and_a_late_one(make_job, Scheduled)
    for other in others:
        other.kill()
    job.wait_steps(c, more=5, participants=1)
    assert job.committed(c)[0]["step"] == 1 < job.events(c, kind="follows")[-1]["follows"]
    [rank] = c.ranks
    finish(Cell("", job), [c])
    assert rank.call("rate") == pytest.approx(0.01 * 0.99 ** job.committed(c)[-1]["step"]), "and so do the schedulers"


@pytest.mark.slow
def test_where_there_is_no_room_for_a_copy_it_heals_plainly(make_job: MakeJob) -> None:
    job = make_job(Ddp, heal_mode="catch_up")
    *others, late = job.all_groups("a", "b", "c")
    job.start(*others, pace_s=PACE_S)
    for other in others:
        other.ranks[0].call("have_no_room")
    job.wait_steps(*others, more=5, participants=2)
    job.start(late, pace_s=PACE_S)
    arrive(job, late, *others)
    assert "healing from" in job.log_of(late)


@pytest.mark.slow
def test_where_there_is_no_room_for_another_step_it_heals_plainly(make_job: MakeJob) -> None:
    job, a, b, c = two_and_a_late_one(make_job, Ddp)
    c.ranks[0].call("have_no_room")
    eventually(lambda: "no memory for another step's gradients" in job.log_of(c), "it gives up", PATIENCE_S)
    arrive(job, c, a, b)


@pytest.mark.slow
def test_ranks_of_a_group_catch_up_each_in_its_time(make_job: MakeJob) -> None:
    """Its ranks hold different states for a while, and contribute nothing until both are there."""
    job = make_job(Ddp, ranks=2, heal_mode="catch_up")
    a, c = job.all_groups("a", "c")
    job.start(a, pace_s=PACE_S)
    job.wait_steps(a, more=3, participants=1)
    add_late(job, c)
    c.ranks[0].call("allow_fetch")
    eventually(lambda: len(job.committed(c)) >= 3, "rank 0 is there", PATIENCE_S)
    assert not any(event["participated"] for event in job.committed(c))
    wait_follows(job, c, 3, rank=1)
    arrive(job, c, a)


@pytest.mark.slow
def test_one_that_has_kept_some_steps_when_its_peers_scale_grows_heals_plainly(make_job: MakeJob) -> None:
    job, a, b, c = two_and_a_late_one(make_job, ScaledLater)
    assert not re.search(GIVEN_UP, job.log_of(c))
    grows_from = job.committed(a)[-1]["step"] + 60
    for group in (a, b, c):
        group.ranks[0].call("grow_from", grows_from)
    eventually(lambda: re.search(GIVEN_UP, job.log_of(c)) is not None, "it finds out", PATIENCE_S)
    arrive(job, c, a, b)
    assert [len(re.findall(GIVEN_UP, job.log_of(group))) for group in (a, b, c)] == [0, 0, 1]


@pytest.mark.slow
def test_one_that_fails_while_another_catches_up_holds_nobody_up(make_job: MakeJob) -> None:
    """Its peers compare their gradients in each step, and do not wait for those that it never tells."""
    job, a, b, c = two_and_a_late_one(make_job, ClippedByNorm)
    a.ranks[0].call("fail_once", RESTS_S)
    [discarded] = eventually(lambda: job.discarded(b), "b knows", RESTS_S)
    before = job.committed(b)[-1]
    assert discarded["time"] - before["time"] < RESTS_S / 2
    arrive(job, c, a, b, is_lossless=False)
