"""DataLoader workers hold the sockets of the rank that forked them, and outlive it: nobody may wait for their end."""

import signal

from tests.agent_client.jobs import Job
from tests.agent_client.orphans import Orphans
from tests.agent_client.training.test_salvage import ACTOR, begin, step_together

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
WORKERS = 2


def test_the_others_go_on_while_a_killed_rank_s_workers_hold_its_connections(job: Job) -> None:
    a, b, c = job.groups("a", "b", "c", actor=ACTOR, salvage=False)
    step_together(a, b, c)
    c.call("fork_loader_workers", WORKERS)
    c.call("hold_backward")
    pending = begin(a, b)
    c.begin("step")
    c.call("wait_in_backward")
    with Orphans(c.pid) as workers:
        assert len(workers.connected_to([a.pid, b.pid])) == WORKERS
        c.signal(signal.SIGKILL)
        assert [each.result()["committed"] for each in pending] == [False, False]
        after = step_together(a, b)
        assert [(each["committed"], each["participants"]) for each in after] == [(True, ["a", "b"])] * 2
        assert len(workers.running()) == WORKERS, "they have outlived that"
