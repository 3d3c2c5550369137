"""A group whose state does not fit, or that cannot get one, ends by itself, with the cause. The others go on, and lose
at most the steps in flight.
"""

import re
import time

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import RankError
from tests.agent_client.step.test_agent import Step, check_equal, meet, step_together

TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s")
ACTOR = "tests.agent_client.misfit_actor:MisfitActor"
CUT_OFF_ACTOR = "tests.agent_client.misfit_actor:CutOffActor"
CUT_OFF_DISCARDS = 4
ENDS_WITHIN_S = 5.0
DIFFERENCES = {
    "width": r"state\['model'\]\['0.weight'\]: shape \(6, 8\) here, \(4, 8\) received, and \d+ more",
    "group": r"state\['optimizer'\]\['param_groups'\]: 2 elements here, 1 received",
}


@pytest.mark.parametrize(("differs_in", "difference"), DIFFERENCES.items())
def test_one_that_comes_back_with_another_model_ends_and_the_others_go_on(
    job: Job, differs_in: str, difference: str
) -> None:
    """`c` comes back each time as another process; the others would not bear as many discards of their own."""
    a, b = job.groups("a", "b", actor=ACTOR, max_consecutive_discards=2)
    meet(job, {"a": a, "b": b})
    job.start_managers("c")
    for number in range(3):
        log: list[Step] = []
        with job.rank("c", 7, actor=ACTOR, differs_in=differs_in, max_consecutive_discards=2) as c:
            ends = c.begin("step")
            while not ends.is_done():
                log += step_together(a, b)
            with pytest.raises(
                RankError,
                match=f"the received state does not match the local one: {difference}; .*start it with theirs",
            ):
                ends.result()
            began_at = time.monotonic()
        log += step_together(a, b) + step_together(a, b)
        assert time.monotonic() - began_at < ENDS_WITHIN_S
        lost = [step for step in log if not step["committed"]]
        assert len(lost) <= 2, f"one of each of the others, in return {number}"
        assert all(step["committed"] for step in log[-2:])
        assert check_equal(log) >= 1
    assert [rank.call("get_faults") for rank in (a, b)] == [0, 0]
    told = job.log("a")
    assert re.search(r"lost c \(.*\); step \d+ redone without it after", told)
    assert re.search(f"the received state does not match the local one: {difference}; ", told)
    assert ".cc:" not in told, "no place in a library's source"


def test_one_that_never_gets_a_state_ends_after_its_own_discards(job: Job) -> None:
    """The others count none of the steps that it fails, though that are more than they would bear."""
    a, b = job.groups("a", "b", actor=ACTOR, max_consecutive_discards=2)
    meet(job, {"a": a, "b": b})
    job.start_managers("c")
    log: list[Step] = []
    with job.rank("c", 7, actor=CUT_OFF_ACTOR, max_consecutive_discards=CUT_OFF_DISCARDS) as c:
        ends = c.begin("steps", 100)
        while not ends.is_done():
            log += step_together(a, b)
        with pytest.raises(RankError, match=rf"{CUT_OFF_DISCARDS} steps discarded in a row .*: healing: .*; quorum of"):
            ends.result()
    log += step_together(a, b) + step_together(a, b)
    lost = [step for step in log if not step["committed"]]
    assert 2 * (CUT_OFF_DISCARDS - 1) <= len(lost) <= 2 * (CUT_OFF_DISCARDS + 1)
    assert all(step["committed"] for step in log[-2:])
    assert [rank.call("get_faults") for rank in (a, b)] == [0, 0]
