"""Child processes of a benchmark, and their CPU time and memory. All of them end with the benchmark."""

import asyncio
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lighthouse_runtime.process.children import die_with_parent

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


class Child:
    """A process with pipes to its standard input and output. Its standard error goes to `log`."""

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
        """Return the CPU seconds of all threads, user and system, from the kernel's clock for another process."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Return the resident memory in 10^6 bytes: the current value (VmRSS), or the peak (VmHWM)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024 / 1e6

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def lines(self) -> Iterator[str]:
        """Return the lines that the process prints until it ends."""
        assert self._process.stdout is not None
        return iter(self._process.stdout.readline, "")

    def read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line.strip() if line else self.fail("ended")

    def ask(self, **order: Any) -> Any:
        """Send an order as a line of JSON, and return the reply."""
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
        """Raise RuntimeError with the end of the log if the process has ended."""
        if self._process.poll() is not None:
            self.fail("ended")

    def fail(self, what: str) -> Any:
        tail = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} (pid {self.pid}) {what}; its last words:\n{tail}")

    def end(self) -> None:
        with self._process:
            self._process.kill()


class Children:
    """All processes of one run. They end with the block, or with this process, even if it is killed."""

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
        """Temporary folder for the files of the processes."""
        return Path(self._logs.name)

    def start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> Child:
        """Start `sys.executable` with `arguments`. A command `within`, such as `ip netns exec`, may precede it."""
        command = [*within, sys.executable, *arguments]
        child = Child(name, command, self.folder / f"{len(self._children)}.log")
        self._children.append(child)
        return child


def allow_many_connections() -> None:
    """Raise the limit of open files, which may be 1024, for this process and its children. 1,000 groups need more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def answer_orders(handle: Callable[..., Any]) -> None:
    """Answer the orders of Child.ask() in the child, until standard input closes."""
    for line in sys.stdin:
        print(json.dumps(handle(**json.loads(line))), flush=True)


async def answer_orders_async(handle: Callable[..., Awaitable[Any]]) -> None:
    """Answer orders while other tasks of the event loop run."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        print(json.dumps(await handle(**json.loads(line))), flush=True)
