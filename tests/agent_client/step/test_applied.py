"""A commit that was not applied, and a state that has changed by itself, under real daemons: found, told, healed."""

import re
from typing import Any

import pytest

from lighthouse_protocol.messages.incident import IncidentSummary
from lighthouse_runtime.client.clients import LighthouseClient
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, RankError
from tests.agent_client.step.test_agent import check_equal as check_states
from tests.processes import Lighthouse

ACTOR = "tests.agent_client.torn_actor:TornActor"
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s")
EVERY = 8

pytestmark = pytest.mark.timeout(300)

Event = dict[str, Any]


def start(job: Job, names: str, ranks: int = 1, **options: Any) -> dict[str, Rank]:
    return job.groups_of(ranks, *names, actor=ACTOR, check_state_every=EVERY, **options)


def train(ranks: dict[str, Rank], until: int, **faults: dict[str, Any]) -> dict[str, list[Event]]:
    """All to that step; `faults` by rank."""
    running = {name: rank.begin("train", until, **faults.get(name, {})) for name, rank in ranks.items()}
    return {name: pending.result(60) for name, pending in running.items()}


def incidents(lighthouse: Lighthouse, job: Job) -> list[IncidentSummary]:
    with LighthouseClient(lighthouse.address, job=job.name) as client:
        return [*reversed(client.incidents(job.name))]


def check_equal(told: dict[str, list[Event]]) -> None:
    assert len({events[-1]["hash"] for events in told.values()}) == 1
    check_states(*([event for event in events if not event["torn"]] for events in told.values()))


def test_an_exception_of_the_optimizer_that_the_script_catches_heals(job: Job, lighthouse: Lighthouse) -> None:
    told = train(start(job, "abc"), 12, **{"b/0": {"raises": (5,)}})
    [torn] = [event for event in told["b/0"] if event["error"]]
    assert (torn["error"], torn["torn"]) == ("the optimizer has no memory left", True)
    check_equal(told)
    after = [event for event in told["b/0"][told["b/0"].index(torn) + 1 :] if event["committed"]]
    # From 6: b had the sum of step 5 and raised before the others had it, as if it had died just then.
    assert [event["step"] for event in after] in ([*range(6, 13)], [*range(7, 13)])
    assert all(event["participated"] for event in after)
    discards = [event for event in told["a/0"] if not event["committed"]]
    assert len(discards) <= 1
    [incident] = incidents(lighthouse, job)
    assert (incident.kind, incident.suspects) == ("not_applied", ("b",))
    assert incident.text == (
        "b: rank 0: step 5 was committed and not applied: OutOfMemory: the optimizer has no memory left"
    )
    assert incident.step_s is not None


def test_an_exception_between_the_vote_and_the_optimizer_that_the_script_catches_heals(
    job: Job, lighthouse: Lighthouse
) -> None:
    told = train(start(job, "ab"), 12, **{"b/0": {"ends": (5,)}})
    [torn] = [event for event in told["b/0"] if event["error"]]
    assert (torn["error"], torn["torn"]) == ("the buffers have no memory left", True)
    check_equal(told)
    assert [incident.text for incident in incidents(lighthouse, job)] == [
        "b: rank 0: step 5 was committed and not applied: OutOfMemory: the buffers have no memory left"
    ]


def test_a_bare_script_that_leaves_a_committed_step_out_heals(job: Job, lighthouse: Lighthouse) -> None:
    told = train(start(job, "ab", bare=True), 16, **{"b/0": {"raises": (5,), "skips": (9,)}})
    check_equal({name: [events[-1]] for name, events in told.items()})
    assert [incident.text for incident in incidents(lighthouse, job)] == [
        "b: rank 0: step 5 was committed, and Tearing.step() began and did not end",
        "b: rank 0: step 9 was committed, and no optimizer has stepped since",
    ]


def test_an_element_that_has_changed_is_found_at_the_next_check(job: Job, lighthouse: Lighthouse) -> None:
    told = train(start(job, "abc"), 32, **{"a/0": {"flips": (11,)}})
    check_equal({name: [events[-1]] for name, events in told.items()})
    assert [[event["step"] for event in events if not event["committed"]] for events in told.values()] == [[16]] * 3
    [incident] = incidents(lighthouse, job)
    assert (incident.kind, incident.suspects) == ("divergence", ("a",))
    assert incident.text == "a: rank 0: the state of step 16 differs from that of b, c"


def test_copies_in_memory_of_a_state_that_has_changed_are_dropped(job: Job) -> None:
    """The copy of step 16 begins before the states of step 16 are compared, and is replaced after the heal."""
    ranks = start(job, "abc", keep_every=EVERY)
    train(ranks, 17, **{"a/0": {"flips": (11,)}})
    (of_a, weights), *others = (rank.call("kept") for rank in ranks.values())
    assert of_a == [16]
    assert others == [([8, 16], weights)] * 2


@pytest.mark.slow
def test_a_group_that_differs_after_each_heal_ends_the_third_time(job: Job, lighthouse: Lighthouse) -> None:
    """Its script is the cause, and says so."""
    ranks = start(job, "ab")
    ends = ranks["b/0"].begin("train", 400, flips=tuple(range(EVERY // 2, 400, EVERY)))
    others = ranks["a/0"].begin("train", 4 * EVERY)
    with pytest.raises(RankError, match=r"ScriptMismatch.*\(3 of 3\): the script is the cause; most likely"):
        ends.result(120)
    ranks["b/0"].kill()
    assert others.result(120)[-1]["step"] == 4 * EVERY
    assert re.search(r"in b differs from a, again after it has healed \(2 of 3\): the script is the", job.log("a"))


def test_alone_there_is_nothing_to_heal_from(job: Job) -> None:
    rank = start(job, "a")["a/0"]
    with pytest.raises(RankError, match=r"step 3 was committed and not applied.*no other group.*last checkpoint") as e:
        rank.call("train", 8, (3,))
    assert e.value.kind == "AgentError"
    assert "not applied" in rank.call("keep")


def test_groups_of_two_ranks_end_with_the_same_bits_whatever_is_torn(job: Job, lighthouse: Lighthouse) -> None:
    ranks = start(job, "ab", ranks=2)
    told = train(ranks, 60, **{"b/1": {"raises": (7, 30)}, "a/0": {"raises": (18,)}, "b/0": {"flips": (41,)}})
    check_equal({name: [events[-1]] for name, events in told.items()})
    kinds = [(incident.kind.value, *incident.suspects) for incident in incidents(lighthouse, job)]
    assert kinds == [("not_applied", "b"), ("not_applied", "a"), ("not_applied", "b"), ("divergence", "b")]
