"""A daemon goes before other processes on busy cores, where it may and nobody has said otherwise."""

import os

import pytest

from lighthouse_runtime.process.loop import NICE
from tests.processes import Process

DAEMON = """
import os, sys, threading
from lighthouse_runtime.process.loop import run_daemon

os.nice(int(sys.argv[1]))
if sys.argv[2] == "nobody":
    os.setuid(65534)

async def main(stop):
    print("nice", os.getpriority(os.PRIO_PROCESS, 0))
    thread = threading.Thread(target=lambda: print("thread", os.getpriority(os.PRIO_PROCESS, 0)))
    thread.start()
    thread.join()

sys.exit(run_daemon(main))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="raising a process's priority is root's")
@pytest.mark.parametrize(("nice", "user", "expected"), [(0, "root", NICE), (5, "root", 5), (0, "nobody", 0)])
def test_priority(nice: int, user: str, expected: int):
    with Process(DAEMON, [str(nice), user]) as process:
        assert process.wait() == 0, process.log()
        assert f"nice {expected}\nthread {expected}" in process.log()
