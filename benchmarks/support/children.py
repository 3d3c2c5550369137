"""The processes of a benchmark: started, asked, measured, and ended by their pid, whatever happens."""

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lighthouse_runtime.process.children import die_with_parent

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


class Child:
    """A process with pipes to its standard input and output; what it logs is kept for the case that it dies."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time of all its threads so far: the kernel's CPU clock of another process."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident now, or at its peak (VmHWM), in 10^6 bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024 / 1e6

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def lines(self) -> Iterator[str]:
        """What it prints, until it ends."""
        assert self._process.stdout is not None
        return iter(self._process.stdout.readline, "")

    def read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line.strip() if line else self.fail("ended")

    def ask(self, **order: Any) -> Any:
        """Send a line of JSON; the line of JSON that answers it."""
        self.send(**order)
        return self.answer()

    def send(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self.read_line())

    def wait_for_port(self, port: int) -> None:
        ends_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_at and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        self.fail(f"does not listen on port {port}")

    def check(self) -> None:
        """Raises RuntimeError with its last words if it has ended."""
        if self._process.poll() is not None:
            self.fail("ended")

    def fail(self, what: str) -> Any:
        tail = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} (pid {self.pid}) {what}; its last words:\n{tail}")

    def end(self) -> None:
        with self._process:
            self._process.kill()


class Children:
    """All the processes of one run; none outlives the `with`, nor this process, even where it is killed."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._logs = tempfile.TemporaryDirectory(prefix="lighthouse-benchmark-")

    def __enter__(self) -> Self:
        allow_many_connections()
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        for child in reversed(self._children):
            child.end()
        self._logs.cleanup()

    @property
    def folder(self) -> Path:
        """For their files; it goes with them."""
        return Path(self._logs.name)

    def start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> Child:
        """`sys.executable` with `arguments`; `within` is the command that shall execute that."""
        command = [*within, sys.executable, *arguments]
        child = Child(name, command, self.folder / f"{len(self._children)}.log")
        self._children.append(child)
        return child


def allow_many_connections() -> None:
    """Some systems give a process 1024 open files; a server of 1,000 replica groups needs more. Children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
