"""DataLoader workers hold the sockets of the rank that forked them, and outlive it: nobody may wait for their end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from lighthouse_runtime.process.children import started_at
from tests.agent_client.clusters import descendants, is_running
from tests.agent_client.jobs import Job
from tests.agent_client.training.test_salvage import ACTOR, begin, step_together

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
WORKERS = 2
ESTABLISHED = "01"

Ends = tuple[str, str]


@contextlib.contextmanager
def ended_at_exit(pids: list[int]) -> Iterator[None]:
    started = {pid: started_at(pid) for pid in pids}
    try:
        yield
    finally:
        for pid, at in started.items():
            with contextlib.suppress(OSError):
                if is_running(pid) and started_at(pid) == at:
                    os.kill(pid, signal.SIGKILL)


def connections(pid: int) -> set[Ends]:
    """(here, there) of each TCP connection that the process holds."""
    names: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(os.readlink(descriptor))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {(row[1], row[2]) for row in rows if row[3] == ESTABLISHED and f"socket:[{row[9]}]" in names}


def test_the_others_go_on_while_a_killed_rank_s_workers_hold_its_connections(job: Job) -> None:
    a, b, c = job.groups("a", "b", "c", actor=ACTOR, salvage=False)
    step_together(a, b, c)
    c.call("fork_loader_workers", WORKERS)
    c.call("hold_backward")
    pending = begin(a, b)
    c.begin("step")
    c.call("wait_in_backward")
    workers = descendants(c.pid)
    with ended_at_exit(workers):
        to_peers = [{(there, here) for here, there in connections(peer.pid)} for peer in (a, b)]
        holding = [pid for pid in workers if all(connections(pid) & ends for ends in to_peers)]
        assert len(holding) == WORKERS
        c.signal(signal.SIGKILL)
        assert [each.result()["committed"] for each in pending] == [False, False]
        after = step_together(a, b)
        assert [(each["committed"], each["participants"]) for each in after] == [(True, ["a", "b"])] * 2
        assert all(map(is_running, holding)), "they have outlived that"
