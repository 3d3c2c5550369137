"""Restart in process with hot spares: six of eight ranks train, and two wait. Runs without torch in a minute.

    python -m examples.restart_wrapper

Rank 2 raises an error in iteration 0, so all six ranks start the next iteration in the same processes. Then rank 1 is
killed by SIGKILL, as the kernel would do. A spare becomes rank 1, and the others keep their numbers. Under a supervisor
(`lighthouse-manager run`, or fork_and_monitor() at the top of the script), the killed rank would return as a spare.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from agent_client import CallWrapper, Wrapper
from examples.ports import free_port
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.process.commands import START_LIGHTHOUSE

RANKS, ACTIVE, STEPS = 8, 6, 20


@Wrapper(
    use_global_iteration=True,
    barrier_timeout=timedelta(minutes=5),
    active_world_size=ACTIVE,
    min_active=4,
)
def fault_tolerant_training(call_wrapper: CallWrapper) -> str:
    iteration, rank = call_wrapper.iteration, call_wrapper.rank
    print(f"iteration {iteration}: rank {rank} of {call_wrapper.world_size}", flush=True)
    for step in range(STEPS):
        time.sleep(0.05)  # a step of the training
        call_wrapper.ping()
        if (iteration, rank, step) == (0, 2, 5):
            raise RuntimeError("GPU error")
        if (iteration, rank, step) == (1, 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
    return f"rank {rank} has finished iteration {iteration}"


def work() -> None:
    print(fault_tolerant_training() or "a spare to the end", flush=True)


# -- the rest replaces a cluster


def main() -> int:
    port = free_port()
    lighthouse = [
        sys.executable,
        "-c",
        START_LIGHTHOUSE,
        "serve",
        "--bind",
        f"127.0.0.1:{port}",
        "--http",
        "127.0.0.1:0",
    ]
    daemon = subprocess.Popen([*lighthouse, "--journal", "none", "--log-level", "warning"], env=_variables())
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            place = {"LIGHTHOUSE_ADDRESS": f"127.0.0.1:{port}", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            ranks.append(subprocess.Popen([sys.executable, __file__, "work"], env=_variables() | place))
        ended = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for process in (*ranks, daemon):
            process.kill()
            process.wait()
    print(f"exit codes: {ended}")
    return 0 if sorted(ended) == [-signal.SIGKILL] + [0] * (RANKS - 1) else 1


def _variables() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("LIGHTHOUSE_", "TORCHELASTIC_"))}
    return mine | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


if __name__ == "__main__":
    try:
        sys.exit(work() if sys.argv[1:] == ["work"] else main())
    except LighthouseError as e:
        sys.exit(f"this rank takes no part: {e}")
