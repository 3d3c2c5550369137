"""Run the training that freezes (train.py) under a lighthouse on this machine, and print where it is stuck.

    python -m examples.freeze.run --mode loader

The program ends with the training, or some seconds after the lighthouse reports a stall.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.daemons import Daemon, command, end_by_signals, lighthouse, python_path
from examples.freeze.train import MODES
from examples.ports import LOOPBACK, free_port
from lighthouse_protocol.messages.status import JobStatus
from lighthouse_runtime.client.clients import LighthouseClient

HERE = Path(__file__).parent
RANKS = 8
STALL_AFTER_S = 3.0


class FreezeRun:
    """Context manager for a lighthouse and a supervised training. All their processes end at its exit."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        *arguments: str,
        ranks: int = RANKS,
        stall_after_s: float = STALL_AFTER_S,
        max_restarts: int = 0,
    ) -> None:
        """Prepare the processes, which write logs and checkpoints to `folder`.

        The lighthouse orders a restart of the suspects of a stall, up to `max_restarts` times.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.logs = folder / "logs"
        self.supervisor_log = folder / "supervisor.log"
        port, stall_after = free_port(), ("--stall-timeout", f"{stall_after_s}s")
        self.address = f"{LOOPBACK}:{port}"
        self._port = port
        on_stall = ("--on-stall", "restart-suspects" if max_restarts else "notify")
        self._lighthouse = lighthouse(folder, self.address, (*stall_after, *on_stall))
        paths = ("--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(self.logs))
        run = [
            *(
                "run",
                "--lighthouse",
                self.address,
                "--replica-id",
                "train",
                "--nproc-per-node",
                str(ranks),
                *stall_after,
            ),
            *("--bind", f"{LOOPBACK}:{free_port()}", "--advertise", LOOPBACK),
            *("--master-port", str(free_port()), "--store-port", str(free_port())),
            *("--max-restarts", str(max_restarts), "--drain-timeout", "2s", "--termination-grace", "1s"),
            *("--", str(HERE / "train.py"), "--mode", mode, *paths, *arguments),
        ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        self.supervisor = Daemon("supervisor", command("manager", run), self.supervisor_log, environment)

    def __enter__(self) -> Self:
        self._lighthouse.start()
        self._lighthouse.wait_port(self._port)
        self._client = LighthouseClient(self.address)
        self.supervisor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()
        self.supervisor.stop()
        self._lighthouse.stop()

    def look(self) -> JobStatus | None:
        jobs = self._client.status(ranks=True, timeout_s=10.0).jobs
        return jobs[0] if jobs else None

    def wait(self, within_s: float, *, passes_verdicts: bool = False) -> JobStatus | None:
        """Wait for a verdict and return the status that contains it, or None if the training ends without one.

        If `passes_verdicts`, ignore verdicts. Raise TimeoutError after `within_s` seconds.
        """
        ends_at = time.monotonic() + within_s
        while self.supervisor.is_alive:
            job = self.look()
            if job is not None and job.stall and not passes_verdicts:
                return job
            if time.monotonic() > ends_at:
                raise TimeoutError(f"not at its end after {within_s:g} s; see {self.folder}")
            time.sleep(0.1)
        return None

    def check_all_ranks(self) -> "subprocess.CompletedProcess[str]":
        """Run check_all_ranks.sh and return its output."""
        folder = Path(sys.executable).parent
        environment = os.environ | {"LIGHTHOUSE_ADDRESS": self.address, "COLUMNS": "120"}
        environment["PATH"] = os.pathsep.join([str(folder), environment["PATH"]])
        script = ["sh", str(HERE / "check_all_ranks.sh"), str(self.logs)]
        return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="loader")
    parser.add_argument("--max-restarts", type=int, default=0, help="maximum restarts of ranks that are behind")
    parser.add_argument("--folder", type=Path, help="folder for logs and checkpoints; default: a new folder")
    parser.add_argument("more", nargs="*", help="arguments for train.py, after --")
    args = parser.parse_args(arguments)
    end_by_signals()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="freeze-"))
    with FreezeRun(folder, args.mode, *args.more, max_restarts=args.max_restarts) as run:
        job = run.wait(within_s=600.0)
        if job is not None:
            print(run.check_all_ranks().stdout)
        if job is not None and args.max_restarts:
            run.wait(600.0, passes_verdicts=True)
            job = job if run.supervisor.status else None
        print(f"{'frozen' if job else 'trained to the end'}; all logs are in {folder}")


if __name__ == "__main__":
    main()
