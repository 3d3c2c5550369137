"""`lighthouse-manager run --preload`: restarts, ends, and that nothing is left behind."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from manager.guard.process_tree import environment
from tests.daemons.supervisors import QUICK, Supervisor, restarted
from tests.processes import Lighthouse, eventually

SLEEP = "import time; time.sleep(600)"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # else numpy starts some when it is imported
FIRST = "import os, sys\nif os.environ['LIGHTHOUSE_ATTEMPT'] != '0': sys.exit(0)\n"


def preloading(lighthouse: Lighthouse, folder: Path, code: str, *options: str, modules: str = "decimal") -> Supervisor:
    """Its script is `code`."""
    script = folder / "train.py"
    script.write_text(code)
    return Supervisor(lighthouse.address, "--preload", modules, *QUICK, *options, command=[str(script)], env=ONE_THREAD)


def ranks(supervisor: Supervisor, count: int) -> list[int]:
    """Those that have become one: all but the interpreter that they are forked from."""

    def found() -> list[int]:
        return [pid for pid in supervisor.below if not re.search(rb"^$|LIGHTHOUSE_TREE=\d+\.0+\.", environment(pid))]

    return eventually(lambda: pids if len(pids := found()) == count else [], f"{count} ranks")


def test_ranks_restart_and_end(lighthouse: Lighthouse, tmp_path: Path) -> None:
    code = f"{FIRST}print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
    code += "if os.environ['RANK'] == '0': os.kill(os.getpid(), 11)\nimport time; time.sleep(600)"
    with preloading(lighthouse, tmp_path, code, "--nproc-per-node", "2") as supervisor:
        assert supervisor.wait() == 0
        log = supervisor.log()
    assert "[a/0] rank 0 of 2\n" in log
    assert "a/0 died: SIGSEGV" in log
    assert "started ranks [0, 1], attempt 1" in log


def test_a_killed_rank_comes_back_and_a_killed_supervisor_leaves_none(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """Not even a process that a rank has forked, and that has left its session."""
    code = f"import os\nif os.fork() == 0: os.setsid()\n{SLEEP}"
    with preloading(lighthouse, tmp_path, code) as supervisor:
        first = ranks(supervisor, 2)
        os.kill(min(first), signal.SIGKILL)
        restarted(supervisor, 1)
        second = ranks(supervisor, 2)
        assert not set(first) & set(second)
        supervisor.kill()
        eventually(supervisor.gone, "no orphan is left")


def test_a_module_that_is_not_there(lighthouse: Lighthouse, tmp_path: Path) -> None:
    options = ("--max-restarts", "9")
    with preloading(lighthouse, tmp_path, "print('ran')", *options, modules="json,no_such") as supervisor:
        assert supervisor.wait() == 1
        log = supervisor.log()
    assert "ends with 1: cannot preload no_such: ModuleNotFoundError: No module named 'no_such'" in log
    assert "[a/0] ran" not in log
    assert "restarts in" not in log


@pytest.mark.slow
def test_torch_is_there_at_once(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """The first rank waits for the import, the next ones do not: each says how long it took since its own start."""
    pytest.importorskip("torch")
    code = (
        "import os, time; began = time.monotonic(); import torch, torch._dynamo; took = time.monotonic() - began\n"
        "assert len(os.listdir('/proc/self/task')) == 1, 'the import has started threads'\n"
        "assert torch.initial_seed() == torch.default_generator.initial_seed()\n"
        "x = torch.ones(8, requires_grad=True); sgd = torch.optim.SGD([x]); (x * x).sum().backward(); sgd.step()\n"
        "print('import took', took, flush=True)\n"
        "if os.environ['LIGHTHOUSE_ATTEMPT'] == '0': os.kill(os.getpid(), 9)\n"
    )
    alone = [sys.executable, "-c", code.replace("= '0'", "= 'x'")]
    by_exec = Supervisor(lighthouse.address, *QUICK, command=alone, replica_id="by-exec", env=ONE_THREAD)
    with by_exec, preloading(lighthouse, tmp_path, code, modules="torch,torch._dynamo") as forked:
        assert forked.wait() == by_exec.wait() == 0, (forked.log(), by_exec.log())
        cold_s, warm_s = (
            [float(took) for took in re.findall(r"^\[[a-z-]+/0\] import took (\S+)", log.log(), re.MULTILINE)]
            for log in (by_exec, forked)
        )
    assert len(warm_s) == 2
    assert max(warm_s) < cold_s[0], (warm_s, cold_s)
