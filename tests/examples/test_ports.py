"""Processes on one host draw ports that no two of them share."""

import json

from tests.processes import Process, together

DRAW = """
import json, signal
from examples import ports
ports.PORTS = range(28_000, 28_200)
print("drew", json.dumps([ports.free_port() for _ in range(60)]), flush=True)
signal.pause()
"""


def test_a_port_that_one_process_drew_is_no_other_s() -> None:
    with together(Process(DRAW), Process(DRAW)) as processes:
        drawn = [port for process in processes for port in json.loads(process.wait_for_log(r"^drew (.*)$")[1])]
    assert len(set(drawn)) == len(drawn) == 120
