"""One of our commands as a child process that serves, to kill and to start again."""

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from examples.ports import LOOPBACK

ROOT = Path(__file__).resolve().parent.parent


class ClusterError(RuntimeError):
    """A part of the cluster did not come up; the message names its log."""


class Daemon:
    """Its output goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
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
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
            )

    def listens(self, port: int) -> bool:
        """Raises ClusterError if the process has ended."""
        if not self.is_alive:
            raise ClusterError(f"{self.name} has ended; see {self._log}")
        try:
            socket.create_connection((LOOPBACK, port), 1.0).close()
        except OSError:
            return False
        return True

    def wait_port(self, port: int, timeout_s: float = 60.0) -> None:
        """Until something listens there. Raises ClusterError."""
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at:
            if self.listens(port):
                return
            time.sleep(0.02)
        raise ClusterError(f"{self.name} does not listen on port {port} after {timeout_s:g} s; see {self._log}")

    def kill(self) -> None:
        """SIGKILL, to this one process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()
