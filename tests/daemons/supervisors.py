"""`lighthouse-manager run` as a real process, and what runs below it."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manager.guard.process_tree import environment
from tests.processes import LOCALHOST, MANAGER_CODE, Process, eventually

MARK = "SUPERVISOR_TEST_MARK"

SLEEP = "exec sleep 600"
QUICK = ("--restart-delay", "50ms", "--max-startup-failures", "0")
ONCE = 'test "$LIGHTHOUSE_ATTEMPT" = 0 || exit 0;'


class Supervisor(Process):
    """It runs `command` for each rank: a shell script, or words. On a free port, without a store, unless `options` say
    otherwise. Everything below it carries a mark of its own."""

    def __init__(
        self,
        lighthouse: str,
        *options: str,
        command: str | Sequence[str],
        replica_id: str = "a",
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.mark = secrets.token_hex(8)
        words = ["sh", "-c", command] if isinstance(command, str) else command
        given = {option.partition("=")[0] for option in options}
        defaults = {"--bind": f"{LOCALHOST}:0", "--advertise": LOCALHOST, "--store": f"{LOCALHOST}:1"}
        chosen = [part for name, value in defaults.items() if name not in given for part in (name, value)]
        named = ["--lighthouse", lighthouse, "--replica-id", replica_id]
        arguments = ["run", *named, *chosen, *options, "--", *words]
        super().__init__(MANAGER_CODE, arguments, env={**(env or {}), MARK: self.mark}, **more)

    def ready(self) -> None:
        self.wait_for_log(r"started ranks|exits with|lighthouse unreachable|^(Usage|Error): ")

    @property
    def below(self) -> list[int]:
        """All processes that it has started, and theirs; without helpers of ours."""
        return [pid for pid in marked(self.mark) if pid != self.pid and not _is_ours(pid)]

    def gone(self) -> bool:
        """Nothing of it runs, the guard included."""
        return not [pid for pid in marked(self.mark) if pid != self.pid]

    def stores(self) -> list[int]:
        """The process that hosts the group's TCPStore, or is about to."""
        return [pid for pid in marked(self.mark) if b"manager/store/program.py" in _read(f"/proc/{pid}/cmdline")]

    def guard(self) -> int:
        return next(pid for pid in marked(self.mark) if pid != self.pid and _is_ours(pid))


def marked(mark: str) -> list[int]:
    sign = f"{MARK}={mark}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and sign in environment(int(name))]


def restarted(supervisor: Supervisor, attempt: int) -> None:
    supervisor.wait_for_log(rf"started ranks \[.*\], attempt {attempt}")


def runs(supervisor: Supervisor, count: int) -> list[int]:
    return eventually(lambda: below if len(below := supervisor.below) == count else [], f"{count} processes")


def python(code: str) -> list[str]:
    """A rank in Python that imports nothing of ours."""
    return [sys.executable, "-S", "-E", "-c", code]


def _is_ours(pid: int) -> bool:
    return b"manager.guard.guard" in _read(f"/proc/{pid}/cmdline")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
