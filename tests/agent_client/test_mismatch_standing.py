"""Where a quorum stands: a group that comes back with another script costs the others one step, and no more."""

import re

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank
from tests.agent_client.test_mismatch import OTHERS, RIGHT, SCRIPTED
from tests.processes import eventually

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")


@pytest.mark.parametrize("case", OTHERS)
def test_it_ends_with_the_cause_and_the_others_lose_one_step_each_time(job: Job, case: str) -> None:
    wrong, told = OTHERS[case]
    a, b = job.groups("a", "b", actor=SCRIPTED)
    for rank in (a, b):
        rank.call("begin_training", *RIGHT)
    wait_commits(a, 5, participants=["a", "b"])
    job.start_managers("c")
    for returns in (1, 2):
        c = job.rank("c", seed=7, actor=SCRIPTED)
        mismatch = c.call("step", *wrong)["mismatch"]
        for words in (f"this group (c) {told}", "where a and b", "agent.quorum_step"):
            assert words in mismatch
        wait_commits(a, 5, participants=["a", "b"])
        c.begin("end")
        discards = [step for step in a.call("tried_steps") if not step["committed"]]
        assert len(discards) <= returns
        assert all(faults == 0 for _, faults in (step["discards"] for step in discards))
    ended = [rank.begin("end_training") for rank in (a, b)]
    b.begin("end")  # the other one may wait for it in its last step
    assert ended[0].result()[-1]["step"] > 10
    assert f"c {told}" in job.log("a")
    assert re.search(rf"ScriptMismatch: step \d+: this group \(c\) {re.escape(told)}", job.log("c-manager"))


def wait_commits(rank: Rank, count: int, *, participants: list[str]) -> None:
    """So many more in a quorum of these."""
    before = len(rank.call("tried_steps"))

    def is_done() -> bool:
        new = rank.call("tried_steps")[before:]
        return sum(step["committed"] and step["participants"] == participants for step in new) >= count

    eventually(is_done, f"{count} more steps of {participants}")
