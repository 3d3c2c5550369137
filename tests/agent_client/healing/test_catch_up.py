"""A group that catches up, under real daemons: nobody waits for it, and it ends with the same bits."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Pending, Rank
from tests.processes import PATIENCE_S, eventually

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.catch_up_actor:CatchUpActor"
PACE_S = 0.02

pytestmark = pytest.mark.timeout(300)

Event = dict[str, Any]


class Training:
    """Groups that train, each rank under its name: all that it has told so far."""

    def __init__(self, job: Job, *names: str, actor: str = ACTOR, **options: Any) -> None:
        self.job = job
        self.options = options | {"actor": actor}
        self.ranks: dict[str, Rank] = {}
        self.running: dict[str, Pending] = {}
        self.gone: list[list[Event]] = []
        self.seeds = iter(range(100))
        job.start_managers(*names)

    def start(self, name: str, *, holds_fetch: bool = False, **options: Any) -> Rank:
        rank = self.job.rank(name, next(self.seeds), **self.options, **options)
        if holds_fetch:
            rank.call("hold_fetch")
        self.ranks[name] = rank
        self.running[name] = rank.begin("train", PACE_S)
        return rank

    def kill(self, name: str) -> None:
        self.gone.append(self.events(name))
        self.ranks.pop(name).kill()
        del self.running[name]

    def events(self, name: str) -> list[Event]:
        return self.ranks[name].call("events")

    def committed(self, name: str) -> list[Event]:
        return [event for event in self.events(name) if event["committed"]]

    def wait(self, name: str, count: int, **fields: Any) -> None:
        """Until so many more committed steps are told that have these fields."""
        wait_told(self.ranks[name], count, **fields)

    def finish(self) -> dict[str, list[Event]]:
        told = finish({rank: self.running[name] for name, rank in self.ranks.items()}, self.gone)
        return dict(zip(self.ranks, told, strict=True))


def finish(running: Mapping[Rank, Pending], gone: Sequence[list[Event]] = ()) -> list[list[Event]]:
    """All go as far as the furthest, and a little more; what each has told."""
    last = 10 + max(event["step"] for rank in running for event in rank.call("events"))
    for rank in running:
        rank.call("finish_at", last)
    for pending in running.values():
        pending.result()
    told = [rank.call("events") for rank in running]
    assert {events[-1]["step"] for events in told} == {last}
    assert len({events[-1]["hash"] for events in told}) == 1
    check_states([*gone, *told])
    return told


def check_states(told: list[list[Event]]) -> None:
    """Who has committed the same step under the same quorum, and holds it, has the same bits."""
    states: dict[tuple[int, int], tuple[str, float, int]] = {}
    for events in told:
        for event in events:
            if event["committed"] and not event["follows"]:
                state = event["hash"], event["lr"], event["batches"]
                assert states.setdefault((event["step"], event["quorum_id"]), state) == state


def discards(events: list[Event]) -> int:
    return sum(not event["committed"] for event in events)


def two_and_a_late_one(job: Job, **options: Any) -> Training:
    """a and b train; c is there, has committed some steps, and waits for its snapshot."""
    training = Training(job, "a", "b", "c", **options)
    training.start("a")
    training.start("b")
    training.wait("a", 5, participants=["a", "b"])
    late = training.start("c", holds_fetch=True)
    late.call("wait_fetching")
    return training


def test_the_others_go_on_while_it_fetches_and_it_gets_there(job: Job) -> None:
    training = two_and_a_late_one(job)
    training.wait("c", 10, follows=True, participated=False)
    training.wait("a", 10, participants=["a", "b", "c"])
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 5, follows=False, participated=True)
    told = training.finish()
    assert [discards(events) for events in told.values()] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["exponential", "one_cycle"])
def test_schedulers_move_with_the_steps_that_are_applied(job: Job, schedule: str) -> None:
    """And parameters that a step does not use have no gradient then."""
    training = two_and_a_late_one(job, schedule=schedule, branches=True)
    training.wait("c", 8, follows=True)
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 5, participated=True)
    training.finish()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "sources"), [("a", ["a", "b"]), ("b", ["a"])], ids=["its source", "another group"])
def test_a_group_dies_and_it_goes_on_with_what_it_still_gets(job: Job, victim: str, sources: list[str]) -> None:
    training = two_and_a_late_one(job)
    training.wait("c", 5, follows=True)
    training.kill(victim)
    survivor = "b" if victim == "a" else "a"
    training.wait(survivor, 3, participants=[survivor, "c"])
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 5, participated=True)
    assert re.findall(r"catching up from (\w+) at", job.log("c")) == sources
    training.finish()


@pytest.mark.slow
def test_two_catch_up_at_once(job: Job) -> None:
    training = two_and_a_late_one(job)
    training.job.start_managers("d")
    training.wait("c", 3, follows=True)
    later = training.start("d", holds_fetch=True)
    later.call("wait_fetching")
    training.wait("d", 5, participants=["a", "b", "c", "d"], follows=True)
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 3, participated=True)
    training.wait("d", 3, follows=True)
    later.call("allow_fetch")
    training.wait("d", 3, participated=True)
    assert job.log("c").count("catching up from ") == job.log("d").count("catching up from ") == 1
    told = training.finish()
    assert [discards(told[name]) for name in "ab"] == [0, 0]


@pytest.mark.slow
def test_all_others_die_and_it_goes_on_from_what_it_holds(job: Job) -> None:
    training = two_and_a_late_one(job, schedule="exponential")
    training.wait("c", 5, follows=True)
    training.kill("a")
    training.kill("b")
    training.wait("c", 5, participants=["c"], participated=True, follows=False)
    steps = [event["step"] for event in training.committed("c")]
    assert min(steps[-5:]) < max(steps), "from the step of the state that it holds"
    lone = training.committed("c")[-1]
    assert lone["lr"] == pytest.approx(0.05 * 0.99 ** lone["step"]), "and so do the schedulers"
    training.finish()


@pytest.mark.slow
def test_where_there_is_no_room_for_a_copy_it_heals_plainly(job: Job) -> None:
    training = Training(job, "a", "b", "c")
    for name in "ab":
        training.start(name).call("have_no_room")
    training.wait("a", 5, participants=["a", "b"])
    training.start("c")
    training.wait("c", 5, participated=True)
    assert "healing from" in job.log("c")
    told = training.finish()
    assert [discards(told[name]) for name in "ab"] == [0, 0]


@pytest.mark.slow
def test_where_there_is_no_room_for_another_step_it_heals_plainly(job: Job) -> None:
    training = two_and_a_late_one(job)
    training.wait("c", 3, follows=True)
    training.ranks["c"].call("have_no_room")
    eventually(lambda: "no room for the gradients of another step" in job.log("c"), "it gives up", PATIENCE_S)
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 5, participated=True, follows=False)
    told = training.finish()
    assert [discards(told[name]) for name in "ab"] == [0, 0]


def ranks_of(job: Job, name: str) -> list[Rank]:
    """Two, built at once: they meet while they are."""
    with ThreadPoolExecutor(2) as pool:
        build = lambda rank: job.rank(name, rank, actor=ACTOR, rank=rank, ranks=2)  # noqa: E731
        return list(pool.map(build, (0, 1)))


@pytest.mark.slow
def test_ranks_of_a_group_catch_up_each_in_its_time(job: Job) -> None:
    """Its ranks hold different states for a while, and contribute nothing until both are there."""
    job.start_managers("a", "c", ranks=2)
    early = ranks_of(job, "a")
    running = {rank: rank.begin("train", PACE_S) for rank in early}
    wait_told(early[0], 3, participants=["a"])
    late = ranks_of(job, "c")
    for rank in late:
        rank.call("hold_fetch")
    running |= {rank: rank.begin("train", PACE_S) for rank in late}
    wait_told(late[0], 3, follows=True)
    late[0].call("allow_fetch")
    wait_told(late[0], 3, follows=False, participated=False)
    wait_told(late[1], 3, follows=True)
    late[1].call("allow_fetch")
    for rank in late:
        wait_told(rank, 3, participated=True, participants=["a", "c"])
    assert [discards(events) for events in finish(running)] == [0, 0, 0, 0]


def wait_told(rank: Rank, count: int, **fields: Any) -> None:
    before = len(rank.call("events"))

    def is_done() -> bool:
        new = [event for event in rank.call("events")[before:] if event["committed"]]
        return sum(all(event[key] == value for key, value in fields.items()) for event in new) >= count

    eventually(is_done, f"{count} more steps with {fields}", PATIENCE_S)
