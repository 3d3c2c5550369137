"""A group that catches up, and changes its gradients by state that heals: it finds out, heals plainly, and ends with
the same bits as all others."""

import math
import re

import pytest

from tests.agent_client.healing.test_catch_up import Training, discards, two_and_a_late_one
from tests.agent_client.jobs import Job
from tests.processes import PATIENCE_S, eventually

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.transforming_follower:TransformingFollower"
GIVEN_UP = re.compile(
    r"catching up is given up, this group heals plainly: "
    r"step \d+: the gradients here are not those that the others apply"
)
ERRS_FOR_S = 12.0

pytestmark = pytest.mark.timeout(300)


def finish(training: Training, name: str) -> None:
    """`name` counts again; then all end with the same bits, and the scale is one of the bits."""
    training.wait(name, 5, participated=True)
    told = training.finish()
    assert [discards(events) for events in told.values()] == [0, 0, 0]
    assert len({events[-1]["scale"] for events in told.values()}) == 1


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "transform", [pytest.param("scale", marks=SLOW), "torch", pytest.param("adaptive", marks=SLOW)]
)
def test_a_late_one_whose_first_gradients_differ_heals_plainly(job: Job, transform: str) -> None:
    training = two_and_a_late_one(job, actor=ACTOR, transform=transform)
    training.ranks["c"].call("allow_fetch")
    finish(training, "c")
    [_] = GIVEN_UP.findall(job.log("c"))
    assert not any(GIVEN_UP.search(job.log(name)) for name in "ab")


@pytest.mark.slow
def test_one_that_has_kept_some_steps_when_its_peers_scale_grows_heals_plainly(job: Job) -> None:
    """Until then all have the scale that they have begun with."""
    training = two_and_a_late_one(job, actor=ACTOR, transform="scale", from_step=math.inf)
    training.wait("c", 5, follows=True)
    assert not GIVEN_UP.search(job.log("c"))
    grows_from = training.events("a")[-1]["step"] + 60
    for rank in training.ranks.values():
        rank.call("grow_from", grows_from)
    eventually(lambda: GIVEN_UP.search(job.log("c")) is not None, "it finds out", PATIENCE_S)
    training.ranks["c"].call("allow_fetch")
    finish(training, "c")
    [_] = GIVEN_UP.findall(job.log("c"))


def test_clipping_by_the_gradients_own_norm_does_not_end_catching_up(job: Job) -> None:
    training = two_and_a_late_one(job, actor=ACTOR, transform="norm")
    training.wait("c", 10, follows=True)
    training.ranks["c"].call("allow_fetch")
    finish(training, "c")
    assert not GIVEN_UP.search(job.log("c"))
    assert "caught up at step" in job.log("c")


@pytest.mark.slow
def test_one_that_fails_while_another_catches_up_holds_nobody_up(job: Job) -> None:
    """Its peers compare their gradients in each step, and do not wait for those that it never tells."""
    training = two_and_a_late_one(job, actor=ACTOR, transform="norm")
    training.wait("c", 5, follows=True)
    training.ranks["a"].call("err_once", ERRS_FOR_S)
    eventually(lambda: discards(training.events("b")) > 0, "b knows", ERRS_FOR_S)
    [discarded] = [event for event in training.events("b") if not event["committed"]]
    assert discarded["took_s"] < ERRS_FOR_S / 2
    training.ranks["c"].call("allow_fetch")
    training.wait("c", 5, participated=True)
    training.wait("a", 5, participated=True)
    training.finish()
