"""What a script does to the averaged gradients by state that heals, it does by the peer's state: no group diverges."""

import pytest

from tests.agent_client.agent.test_agent import check_equal, meet
from tests.agent_client.jobs import Job

ACTOR = "tests.agent_client.state_dependent_actor:StateDependentActor"


@pytest.mark.parametrize("transform", ["scaler", "adaptive"])
def test_one_that_is_told_in_the_middle_of_a_step_adds_zeros_and_heals_before_the_next(
    job: Job, transform: str
) -> None:
    a, b = job.groups("a", "b", actor=ACTOR, transform=transform)
    meet(job, {"a": a, "b": b}, 2)
    of_a = a.begin("step")
    assert not b.call("step", error="mine")["committed"]
    assert of_a.result()["committed"]
    b.call("believe_that_it_is_current")
    of_b, of_a = (each.result() for each in [b.begin("step"), a.begin("step")])
    assert (of_b["committed"], of_b["participated"], of_a["committed"]) == (False, False, True)
    assert "healing before the next" in job.log("b")
    of_b, of_a = (each.result() for each in [b.begin("step"), a.begin("step")])
    assert (of_b["committed"], of_b["participated"]) == (True, True)
    assert check_equal([of_a], [of_b]) == 1
