"""Lighthouses and managers as child processes, which an example can kill and restart."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.ports import LOOPBACK
from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER

ROOT = Path(__file__).resolve().parent.parent


class ClusterError(RuntimeError):
    """Raised if a daemon does not start or has ended. The message names its log."""


class Daemon:
    """A lighthouse, a manager or a supervisor as a child process. Its output is appended to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Prepare the process. It inherits this process's environment, with `environment` added."""
        self.name = name
        self._environment = environment or {}
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def listens(self, port: int) -> bool:
        """Return whether `port` accepts connections. Raise ClusterError if the process has ended."""
        if not self.is_alive:
            raise ClusterError(f"{self.name} has ended; see {self._log}")
        try:
            socket.create_connection((LOOPBACK, port), 1.0).close()
        except OSError:
            return False
        return True

    def wait_port(self, port: int, timeout_s: float = 60.0) -> None:
        """Wait until `port` accepts connections. Raise ClusterError after `timeout_s` seconds."""
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at:
            if self.listens(port):
                return
            time.sleep(0.02)
        raise ClusterError(f"{self.name} does not listen on port {port} after {timeout_s:g} s; see {self._log}")

    def kill(self) -> None:
        """Send SIGKILL to this process only, and wait until it has exited."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def status(self) -> int | None:
        """Exit status, or None before the start and while the process is running."""
        return self._process.poll() if self._process is not None else None

    def end(self) -> None:
        """Send SIGTERM without waiting."""
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        if self._process is None:
            return
        self.end()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()


def end_by_signals() -> None:
    """Make this process exit on SIGTERM and SIGHUP as it does on Ctrl-C, so that it stops its daemons first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def lighthouse(folder: Path, address: str, arguments: Sequence[str] = ()) -> Daemon:
    """Return a lighthouse that listens on `address`, with its journal and its log in `folder`."""
    serve = ["serve", "--bind", address, "--http", f"{LOOPBACK}:0", "--journal", str(folder / "journal.sqlite")]
    return Daemon("lighthouse", command("lighthouse", [*serve, *arguments]), folder / "lighthouse.log")


def command(package: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a daemon that exits together with this process. `package` is lighthouse or manager."""
    code = {"lighthouse": START_LIGHTHOUSE, "manager": START_MANAGER}[package]
    return [sys.executable, "-c", code, arguments[0], "--parent-pid", str(os.getpid()), *arguments[1:]]


def python_path() -> str:
    """Return a PYTHONPATH with which another process can import this project's modules."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
