"""A loop of the script's own, whatever is in it, through a kill and a heal: bit by bit the same at the same step."""

import pytest

from tests.agent_client.matrix_events import PACE_S, Cell, finish
from tests.agent_client.own_loops import OWN_LOOPS
from tests.agent_client.training_jobs import MakeJob

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")


@pytest.mark.parametrize("loop", OWN_LOOPS)
def test_a_killed_group_comes_back_to_the_same_bits(make_job: MakeJob, loop: str) -> None:
    """Parameters, optimizers, buffers, and all that is registered beside them."""
    job = make_job(OWN_LOOPS[loop])
    a, b = job.all_groups("a", "b")
    job.start(a, b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    a.ranks[0].call("fail_once")
    job.wait_steps(a, b, more=3, participants=2)
    b.kill()
    job.wait_steps(a, more=3, participants=1)
    step, before = job.committed(a)[-1]["step"], len(job.log_of(b))
    job.start(b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    assert job.discarded(a)
    assert job.committed(b)[0]["step"] > step
    assert "healing from a" in job.log_of(b)[before:]
    finish(Cell(loop, job), [a, b])
