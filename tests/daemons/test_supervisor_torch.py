"""A supervisor with torch beside it: the group's store, and torchrun."""

import os
import signal
import sys
from pathlib import Path

import pytest

from examples.ports import free_port
from lighthouse_runtime.client.manager import ManagerClient
from lighthouse_runtime.process.children import who_listens
from tests.daemons.supervisors import Supervisor
from tests.processes import LOCALHOST, Lighthouse, eventually

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

QUICK = ("--restart-delay", "50ms", "--max-startup-failures", "0")
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
    with Supervisor(lighthouse.address, *options, command="exec sleep 600") as supervisor:
        assert f"store {LOCALHOST}:{port};" in supervisor.log()
        assert set_and_get(port, "before") == "there"
        store = int(who_listens(port).split()[1])
        os.kill(store, signal.SIGKILL)
        supervisor.wait_for_log("the group's store has ended by SIGKILL.*; it is started again")
        eventually(lambda: str(store) not in who_listens(port) and who_listens(port).startswith("process"))
        assert set_and_get(port, "after") == "there"
        with ManagerClient(supervisor.wait_for_log(r"serves on (\S+);")[1]) as manager:
            assert manager.quorum(0, 0, timeout_s=60).store_address == f"{LOCALHOST}:{port}"
        assert supervisor.stop() == 143
        assert supervisor.gone()


def test_an_interpreter_without_torch_for_the_store_is_named(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """It is found out by running it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    options = ("--store", "auto", "--store-port", str(free_port()), "--store-python", str(python))
    with Supervisor(lighthouse.address, *options, command="exec sleep 600") as supervisor:
        assert supervisor.wait() == 1
        assert "the group's store does not start" in supervisor.log()
        assert "no torch in" in supervisor.log()


class TestTorchrun:
    SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["REPLICA_GROUP_ID"], flush=True)
if os.environ["LIGHTHOUSE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(STATUS)
"""

    def command(self, folder: Path, status: int) -> list[str]:
        script = folder / "train.py"
        script.write_text(self.SCRIPT.replace("STATUS", str(status)))
        return [*BY_TORCHRUN, "--nproc-per-node=2", "--max-restarts=0", f"--master-port={free_port()}", str(script)]

    def test_its_ranks_are_restarted_by_the_supervisor(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        with Supervisor(lighthouse.address, *QUICK, command=self.command(tmp_path, 3), replica_id="t") as supervisor:
            assert supervisor.wait(110) == 0
            log = supervisor.log()
        assert "manager.server.daemon: manager" in log
        assert "of t (2 ranks)" in log
        assert "rank 1 of 2 t" in log
        assert "t/0 has ended by exit code 3" in log
        assert "started ranks [0], attempt 1" in log

    def test_130_of_one_of_its_ranks_stops_the_run(self, lighthouse: Lighthouse, tmp_path: Path) -> None:
        options = (*QUICK, "--run-id", "torchrun")
        with Supervisor(lighthouse.address, *options, command=self.command(tmp_path, 130)) as supervisor:
            assert supervisor.wait(110) == 130
            assert "rank 0 has ended by exit code 130" in supervisor.log()
