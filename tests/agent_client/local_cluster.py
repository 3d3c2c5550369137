"""A lighthouse, managers and training groups as real processes on loopback, to kill and to start again."""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.daemons import ROOT, ClusterError, Daemon, command, lighthouse, python_path
from examples.ports import LOOPBACK, free_port

TRAIN_SCRIPT = ROOT / "examples" / "train_ddp.py"


class ForkServer:
    """tests/agent_client/fork_server.py as a child process."""

    def __init__(self, log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self._log = log
        self._numbers = itertools.count(1)
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ready = threading.Event()
        self.ended: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Raises ClusterError."""
        if not self._ready.wait(timeout_s):
            raise ClusterError(f"the fork server did not start within {timeout_s:g} s; see {self._log}")

    def start(
        self, arguments: Sequence[str], environment: dict[str, str], output: Path, script: Path = TRAIN_SCRIPT
    ) -> int:
        """The pid of a new process that runs the training script."""
        order = {"script": str(script), "arguments": list(arguments), "environment": environment}
        return self._order(order | {"output": str(output)})

    def start_store(self, port: int, output: Path) -> int:
        """The pid of a new process that hosts a TCPStore."""
        return self._order({"store_port": port, "output": str(output)})

    def _order(self, order: dict[str, Any]) -> int:
        order = {"start": next(self._numbers)} | order
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        try:
            return self._started.get(timeout=30.0)
        except queue.Empty:
            raise ClusterError(f"the fork server does not answer; see {self._log}") from None

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "ready" in said:
                self._ready.set()
            elif "started" in said:
                self._started.put(said["pid"])
            else:
                self.ended[said["ended"]] = said["status"]


@dataclass(slots=True)
class Group:
    """One replica group: its manager and store, its ranks' processes, and how often it was started."""

    name: str
    manager: Daemon
    manager_port: int
    store_port: int
    store_pid: int | None = None
    pids: list[int] = field(default_factory=list)
    starts: int = 0


class LocalCluster:
    """Use as a context manager: nothing of it outlives the block."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: int,
        ranks: int,
        train_arguments: Sequence[str],
        lighthouse_arguments: Sequence[str] = (),
        script: Path = TRAIN_SCRIPT,
    ) -> None:
        """`folder` takes logs and events."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ranks = ranks
        self._train_arguments = train_arguments
        self._script = script
        self._port = free_port()
        self.lighthouse_address = f"{LOOPBACK}:{self._port}"
        self.lighthouse = lighthouse(folder, self.lighthouse_address, lighthouse_arguments)
        self.groups = [self._group(f"group-{number}") for number in range(groups)]
        self.forks = ForkServer(folder / "fork-server.log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Everything, to the point where every rank runs."""
        self.lighthouse.start()
        self.forks.wait_ready()
        self.lighthouse.wait_port(self._port)
        for group in self.groups:
            self.begin_manager(group)
        for group in self.groups:
            group.manager.wait_port(group.manager_port)
            self.start_ranks(group)

    def start_ranks(self, group: Group) -> None:
        master_port = str(free_port())
        group.starts += 1
        for rank in range(self.ranks):
            environment = {
                "LIGHTHOUSE_MANAGER_ADDRESS": f"{LOOPBACK}:{group.manager_port}",
                "LIGHTHOUSE_MANAGER_ADVERTISE": LOOPBACK,
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": master_port,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
            }
            arguments = [*self._train_arguments, "--events", str(self.events(group, rank))]
            group.pids.append(self.forks.start(arguments, environment, self.output(group, rank), self._script))

    def output(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}.log"

    def events(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}-start-{group.starts}.jsonl"

    def kill_ranks(self, group: Group) -> None:
        """SIGKILL to every rank; the manager lives."""
        for pid in group.pids:
            if pid not in self.forks.ended:
                _send(pid, signal.SIGKILL)
        group.pids.clear()

    def kill_manager(self, group: Group) -> None:
        """SIGKILL, to its store too."""
        group.manager.kill()
        if group.store_pid is not None:
            _send(group.store_pid, signal.SIGKILL)
            group.store_pid = None

    def begin_manager(self, group: Group) -> None:
        """The manager and its store, on the ports they always have; it serves a little later."""
        group.store_pid = self.forks.start_store(group.store_port, self.folder / f"{group.name}-store.log")
        group.manager.start()

    def start_manager(self, group: Group) -> None:
        """The same, until it serves."""
        self.begin_manager(group)
        group.manager.wait_port(group.manager_port)

    def has_ended(self, group: Group) -> bool:
        return all(pid in self.forks.ended for pid in group.pids)

    def statuses(self, group: Group) -> list[int | None]:
        """Of the present ranks; None while one runs."""
        return [self.forks.ended.get(pid) for pid in group.pids]

    def stop(self) -> None:
        for group in self.groups:
            self.kill_ranks(group)
        self.forks.stop()
        for group in self.groups:
            group.manager.stop()
        self.lighthouse.stop()

    def _group(self, name: str) -> Group:
        port, store_port = free_port(), free_port()
        arguments = [
            *("serve", "--lighthouse", self.lighthouse_address, "--replica-id", name),
            *("--group-world-size", str(self.ranks), "--bind", f"{LOOPBACK}:{port}"),
            *("--advertise", LOOPBACK, "--store", f"{LOOPBACK}:{store_port}"),
        ]
        manager = Daemon(f"manager of {name}", command("manager", arguments), self._log(name))
        return Group(name, manager, port, store_port)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-manager.log"


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
