"""A lighthouse, and replica groups under `lighthouse-manager run`, which restarts the ranks that an example kills."""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.daemons import Daemon, command, lighthouse, python_path
from examples.ports import LOOPBACK, free_port

TRAIN_SCRIPT = Path(__file__).with_name("train_ddp.py")


@dataclass(slots=True)
class Group:
    """A replica group and its supervisor."""

    name: str
    supervisor: Daemon
    port: int
    log: Path
    pids: dict[int, int] = field(default_factory=dict)  # by rank, from `note_pid`


class SupervisedCluster:
    """Context manager for a lighthouse and its replica groups on this machine. All processes end at its exit."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: int,
        ranks: int,
        train_arguments: Sequence[str],
        lighthouse_arguments: Sequence[str] = (),
    ) -> None:
        """Prepare the processes. They write logs and events to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ranks = ranks
        self._train_arguments = train_arguments
        self._port = free_port()
        self.lighthouse_address = f"{LOOPBACK}:{self._port}"
        self.lighthouse = lighthouse(folder, self.lighthouse_address, lighthouse_arguments)
        self.groups = [self._group(f"group-{number}") for number in range(groups)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        for group in self.groups:
            group.supervisor.end()
        for daemon in (*(group.supervisor for group in self.groups), self.lighthouse):
            daemon.stop()

    def start(self) -> None:
        """Start all processes, and wait until every supervisor accepts connections. The ranks start a little later."""
        self.lighthouse.start()
        self.lighthouse.wait_port(self._port)
        for group in self.groups:
            group.supervisor.start()
        for group in self.groups:
            group.supervisor.wait_port(group.port)

    def note_pid(self, name: str, rank: int, pid: int) -> None:
        group = next(group for group in self.groups if group.name == name)
        group.pids[rank] = pid

    def kill_ranks(self, group: Group, *ranks: int) -> None:
        """Send SIGKILL to these ranks, but not to their supervisor."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(group.pids[rank], signal.SIGKILL)

    def has_ended(self, group: Group) -> bool:
        return not group.supervisor.is_alive

    def _group(self, name: str) -> Group:
        port, log = free_port(), self.folder / f"{name}.log"
        # Each start of a rank writes a separate file.
        events = self.folder / f"{name}-rank-$RANK-start-$TORCHELASTIC_RESTART_COUNT.jsonl"
        arguments = [
            *(
                "run",
                "--lighthouse",
                self.lighthouse_address,
                "--replica-id",
                name,
                "--nproc-per-node",
                str(self.ranks),
            ),
            *("--bind", f"{LOOPBACK}:{port}", "--advertise", LOOPBACK),
            *("--master-port", str(free_port()), "--store-port", str(free_port())),
            *("--drain-timeout", "2s", "--termination-grace", "1s"),
            *("--", str(TRAIN_SCRIPT), *self._train_arguments, "--events", str(events)),
        ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        return Group(name, Daemon(f"supervisor of {name}", command("manager", arguments), log, environment), port, log)
