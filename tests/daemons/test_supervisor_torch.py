"""A supervisor with torch beside it: the group's store, and torchrun."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_protocol.limits import MANAGER_SECRET_VARIABLE
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.process.children import describe_listener
from tests.daemons.supervisors import QUICK, SLEEP, Supervisor
from tests.processes import LOCALHOST, ROOT, Lighthouse, eventually

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

BY_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def set_and_get(port: int, key: str) -> str:
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore(LOCALHOST, port, is_master=False, timeout=timedelta(seconds=60))
    store.set(key, "there")
    return store.get(key).decode()


def test_the_store_outlives_ranks_and_comes_back_when_it_is_killed(lighthouse: Lighthouse) -> None:
    port = free_port()
    options = ("--store", "auto", "--store-port", str(port))
    secret = "known_to_the_group_and_to_this_test"
    env = {MANAGER_SECRET_VARIABLE: secret}
    with Supervisor(lighthouse.address, *options, command=SLEEP, env=env) as supervisor:
        assert f"store {LOCALHOST}:{port};" in supervisor.log()
        assert set_and_get(port, "before") == "there"
        store = int(describe_listener(port).split()[1])
        os.kill(store, signal.SIGKILL)
        supervisor.wait_for_log("the group's store died .SIGKILL.*; restarting it")
        eventually(lambda: str(store) not in describe_listener(port) and describe_listener(port).startswith("process"))
        assert set_and_get(port, "after") == "there"
        with ManagerClient(supervisor.wait_for_log(r"serves on (\S+);")[1], secret) as manager:
            assert manager.quorum(0, 0, timeout_s=60).store_address == f"{LOCALHOST}:{port}"
        assert supervisor.stop() == 143
        assert supervisor.gone()


def test_a_store_that_does_not_start_ends_the_supervisor(lighthouse: Lighthouse) -> None:
    options = ("--store", "auto", "--store-port", str(free_port()), "--store-python", "/bin/false")
    with Supervisor(lighthouse.address, *options, command=SLEEP) as supervisor:
        assert supervisor.wait() == 1
        assert "the group's store does not start (exit code 1)" in supervisor.log()


def test_a_store_whose_port_was_taken_meanwhile_says_so_in_one_line() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        port = taken.getsockname()[1]
        program = [sys.executable, str(ROOT / "manager/store/program.py"), str(port), LOCALHOST]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"cannot listen on {LOCALHOST}:{port} (--store-port): Address already in use\n"


class TestTorchrun:
    SCRIPT = """
import os, sys
attempt, rank = os.environ["LIGHTHOUSE_ATTEMPT"], os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["REPLICA_GROUP_ID"], flush=True)
if rank == "1":
    sys.exit(3 if attempt == "0" else 130)
"""

    def test_its_ranks_are_restarted_by_the_supervisor_and_130_of_one_stops_the_run(
        self, lighthouse: Lighthouse, tmp_path: Path
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text(self.SCRIPT)
        command = [*BY_TORCHRUN, "--nproc-per-node=2", "--max-restarts=0", f"--master-port={free_port()}", str(script)]
        options = (*QUICK, "--run-id", "torchrun")
        with Supervisor(lighthouse.address, *options, command=command, replica_id="t") as supervisor:
            assert supervisor.wait(2 * 110) == 130
            log = supervisor.log()
        assert "manager.server.daemon: manager" in log
        assert "of t (2 ranks)" in log
        assert "rank 1 of 2 t" in log
        assert "t/0 died: exit code 3" in log
        assert "started ranks [0], attempt 1" in log
        assert "rank 0 died: exit code 130" in log
