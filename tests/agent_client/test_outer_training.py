"""LocalSGD and DiLoCo through kill, heal, shrink and grow: after each outer step all groups hold the same bits."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agent_client.clusters import check_all
from tests.agent_client.outer_training import INTERVAL, RANKS, WAYS
from tests.agent_client.ranks import RankServer
from tests.agent_client.training_jobs import Group, TrainingJob
from tests.processes import Lighthouse, eventually

# How long a group is waited for that has nothing to say.
TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")

ACTOR = "tests.agent_client.outer_training:OuterActor"
SEED = 20261121
KILLS = 25

slow = pytest.mark.slow
mostly_slow = [pytest.param(way, marks=() if way == "streamed" else slow) for way in WAYS]


MakeJob = Callable[..., TrainingJob]


@pytest.fixture
def make_job(lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path) -> Iterator[MakeJob]:
    """At the end of a test everything that was ever logged is compared."""
    with ExitStack() as stack:
        yield lambda way, ranks=0, **options: TrainingJob(
            lighthouse.address,
            store,
            rank_server,
            tmp_path,
            stack,
            actor=ACTOR,
            way=way,
            ranks=ranks or RANKS.get(way, 1),
            **options,
        )
    assert check_all(tmp_path) > 0


@pytest.mark.parametrize("way", [pytest.param(way, marks=slow if way == "sharded" else ()) for way in WAYS])
def test_groups_begin_with_the_same_bits_and_one_that_comes_late_heals(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    a, b = job.groups("a", "b")
    job.start(a, b)
    job.wait_steps(a, b, more=3, participants=2)
    step = job.committed(a)[-1]["step"]
    late = job.group("late")
    job.start(late)
    job.wait_steps(a, b, late, more=3, participants=3)
    first, *_ = job.committed(late)
    assert first["step"] > step
    assert first["inner_step"] == first["step"] * INTERVAL, "the sampler's position has healed"
    assert [*job.discarded(a), *job.discarded(b)] == [], "whoever comes costs the others no step"


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_group_costs_the_others_nothing_and_heals_when_it_is_back(make_job: MakeJob, way: str) -> None:
    """The first by name: its store is where all meet, and it is the source of those that heal."""
    job = make_job(way)
    first, *others = groups = job.groups("a", "b", "c")
    job.start(*groups)
    job.wait_steps(*groups, more=2, participants=3)
    first.kill()
    job.wait_steps(*others, more=2, participants=2)
    step = job.committed(others[0])[-1]["step"]
    job.start(first)
    job.wait_steps(*groups, more=2, participants=3)
    assert job.committed(first)[0]["step"] > step
    others[0].kill()
    job.wait_steps(first, others[1], more=2, participants=2)
    assert job.discarded(others[1]) == [], "it tries again with those who are left"


@pytest.mark.parametrize("way", mostly_slow)
def test_a_group_that_drains_costs_the_others_nothing(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    leaves, *others = groups = job.groups("a", "b", "c")
    job.start(*groups)
    job.wait_steps(*groups, more=2, participants=3)
    job.drain(leaves)
    job.wait_steps(*others, more=2, participants=2)
    assert [*job.discarded(others[0]), *job.discarded(others[1])] == []


@pytest.mark.parametrize("way", mostly_slow)
def test_all_groups_but_one_are_killed_at_once(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    survivor, *victims = groups = job.groups("a", "b", "c")
    job.start(*groups)
    job.wait_steps(*groups, more=2, participants=3)
    for victim in victims:
        victim.kill()
    job.wait_steps(survivor, more=2, participants=1)
    job.start(*victims)
    job.wait_steps(*groups, more=2, participants=3)


@pytest.mark.parametrize("way", mostly_slow)
def test_rank_0_of_a_group_is_killed(make_job: MakeJob, way: str) -> None:
    """Its other rank ends when the group is started again, as a supervisor would have it."""
    job = make_job(way, ranks=2)
    a, b = groups = job.groups("a", "b")
    job.start(*groups)
    job.wait_steps(*groups, more=2, participants=2)
    a.ranks[0].kill()
    job.wait_steps(b, more=2, participants=1)
    a.kill()
    job.start(a)
    job.wait_steps(*groups, more=2, participants=2)


def begin_healing(job: TrainingJob, target: Group) -> None:
    """To the moment before it asks for the state."""
    job.build(target)
    for rank in target.ranks:
        rank.call("hold_fetch")
    job.train(target)
    for rank in target.ranks:
        rank.call("wait_fetching")


@pytest.mark.parametrize("way", mostly_slow)
def test_the_source_is_killed_while_another_heals_from_it(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    source, other = job.groups("a", "b")
    job.start(source, other)
    job.wait_steps(source, other, more=2, participants=2)
    target = job.group("c")
    begin_healing(job, target)
    source.kill()
    for rank in target.ranks:
        rank.call("allow_fetch")
    job.wait_steps(other, target, more=2, participants=2)
    job.start(source)
    job.wait_steps(source, other, target, more=2, participants=3)


@pytest.mark.parametrize("way", mostly_slow)
def test_the_target_is_killed_while_it_heals(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    a, b = job.groups("a", "b")
    job.start(a, b)
    job.wait_steps(a, b, more=2, participants=2)
    target = job.group("c")
    begin_healing(job, target)
    target.kill()
    job.wait_steps(a, b, more=2, participants=2)
    job.start(target)
    job.wait_steps(a, b, target, more=2, participants=3)


@pytest.mark.parametrize("way", mostly_slow)
def test_one_that_fails_while_the_others_commit_takes_over_their_state(make_job: MakeJob, way: str) -> None:
    job = make_job(way)
    a, b = job.groups("a", "b")
    job.start(a, b)
    for group in (a, b):
        job.wait_steps(a, b, more=2, participants=2)
        for rank in group.ranks:
            rank.call("fail_once")
    job.wait_steps(a, b, more=3, participants=2)
    for group in (a, b):  # a rank may have seen its peers leave that step first
        assert any("told to fail" in job.log(group, rank) for rank in range(len(group.ranks)))


@slow
@pytest.mark.parametrize(
    "options", [{"state_serving": "hold"}, {"heal_transport": "process_group"}], ids=["hold", "process group"]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_state_may_be_read_in_place_or_come_over_the_process_group(
    make_job: MakeJob, way: str, options: dict[str, str]
) -> None:
    job = make_job(way, **options)
    a, b = job.groups("a", "b")
    job.start(a, b)
    job.wait_steps(a, b, more=2, participants=2)
    c = job.group("c")
    job.start(c)
    job.wait_steps(a, b, c, more=2, participants=3)
    a.kill()
    job.start(a)
    job.wait_steps(a, b, c, more=2, participants=3)


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_kills_at_any_moment_leave_no_trace_in_the_weights(make_job: MakeJob, way: str) -> None:
    """There is always one left that has committed since its start."""
    job, rng = make_job(way), random.Random(f"{SEED} {way}")
    groups = job.groups("a", "b", "c")
    job.start(*groups, pace_s=0.05)
    job.wait_steps(*groups, more=2, participants=3)
    for _ in range(KILLS):
        time.sleep(rng.uniform(0, 0.5))  # the drawn moment, whatever happens in it
        victim = rng.choice(groups)
        others = [group for group in groups if group is not victim]
        eventually(lambda others=others: any(map(job.committed, others)), "somebody else holds the state")
        victim.kill(with_manager=rng.random() < 0.3)
        time.sleep(rng.uniform(0, 0.3))
        job.start(victim, pace_s=0.05)
    job.wait_steps(*groups, more=3, participants=3)
    assert check_all(job.folder) > KILLS
