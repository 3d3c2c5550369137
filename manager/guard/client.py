"""The supervisor's connection to the guard process.

`GuardClient` starts the guard (guard.py), sends it orders, and receives the exits of the processes that it started. If
the guard is killed, its children die with it. Orphaned descendants become children of the supervisor, which is a
subreaper and kills them.
"""

import asyncio
import itertools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lighthouse_runtime.log_event import event
from lighthouse_runtime.process import grpc_environment
from lighthouse_runtime.process.logs import without_credentials
from manager.guard import process_tree
from manager.guard.child import TAIL_LINES, UNKILLABLE_S

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
AWAKE_EVERY_S = 0.5
SWEPT_EVERY_S = 0.01
MAX_CAUSE_CHARS = 500

# The guard imports from the standard library first, then from our folder. Modules of the user cannot shadow either.
_CODE = "import sys; sys.path.append(sys.argv.pop()); from manager.guard.guard import main; main()"
_OURS = str(Path(__file__).resolve().parents[2])
_RANK_SITE = str(Path(__file__).resolve().with_name("rank_site"))


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to the supervisor's environment
    label: str  # prefix of each line of its output
    log: str | None = None  # file for its output, or None
    is_shown: bool = True  # print its output
    has_input: bool = False  # its standard input is a pipe that closes with the guard


@dataclass(frozen=True, slots=True)
class Ended:
    """A process and all of its descendants have ended."""

    status: int  # exit code, or minus the number of the signal, as in subprocess
    output: tuple[str, ...]  # last KEPT_LINES of its output
    cause: str = ""  # why the guard killed it, or the message in the error file of torch's @record


class GuardClient:
    """Runs the guard as a child process. Create it before gRPC is used, and call `run` on the event loop."""

    def __init__(self, *, observes: bool = False, is_all: bool = False) -> None:
        """Start the guard.

        Args:
            observes: Whether to observe ranks without an Agent, once their script creates a torch process group
                (rank_site/sitecustomize.py).
            is_all: Whether this process starts others only through the guard. If so, all its descendants are killed
                once the guard is killed, even those without MARK_VARIABLE in their environment.
        """
        ours, its = socket.socketpair()
        command = [sys.executable, "-P", "-S", "-E", "-c", _CODE, str(its.fileno()), str(os.getpid()), _OURS]
        env = grpc_environment.without_our_defaults(os.environ)
        if observes:  # each Python below the guard imports rank_site; the guard itself ignores PYTHONPATH (-E)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (_RANK_SITE, env.get("PYTHONPATH"))))
        with its:
            self._process = subprocess.Popen(
                command,
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )
        process_tree.become_subreaper()  # adopts the descendants of a killed guard
        self._socket = ours
        self._is_all = is_all
        self._numbers = itertools.count(1)
        self._on_end: dict[int, Callable[[Ended], None]] = {}
        self._tails: dict[int, asyncio.Future[tuple[str, ...]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._has_ended = False
        self._unsent: list[bytes] = []  # orders given before run()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, command: Command, on_end: Callable[[Ended], None]) -> int:
        """Start a process and return its number. `on_end` is called when the whole process tree has ended."""
        number = next(self._numbers)
        self._on_end[number] = on_end
        self._send(start=number, **asdict(command))
        return number

    def halt(self, number: int, grace_s: float) -> None:
        """Send SIGTERM to the process group, and SIGKILL to the whole tree after `grace_s` seconds.

        If the guard does not report the end within another UNKILLABLE_S + END_TIMEOUT_S, it is killed with all its
        processes.
        """
        self._resume_guard()
        self._send(halt=number, grace_s=grace_s)
        asyncio.get_running_loop().call_later(grace_s + UNKILLABLE_S + END_TIMEOUT_S, self._check_end, number)

    def forward_signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a started process if it has a handler, or else to its nearest descendants that have one."""
        self._send(**{"signal": number, "pass": signal_number})

    def signal_tree(self, number: int, signal_number: int, *, is_largest: bool) -> None:
        """Send a signal to a process and its descendants, or only to the largest of them by memory use."""
        self._send(signal_tree=number, is_largest=is_largest, **{"with": signal_number})

    async def tail(self, number: int) -> tuple[str, ...]:
        """Return the last output lines of a process, or an empty tuple if the process or the guard has ended."""
        if self._has_ended:
            return ()
        if number not in self._tails:
            self._tails[number] = asyncio.get_running_loop().create_future()
            self._send(tail=number)
        return await asyncio.shield(self._tails[number])

    async def run(self) -> int:
        """Receive the guard's reports of process exits until the guard itself exits. Return its exit status."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 22)
        self._writer.writelines(self._unsent)
        watching = asyncio.create_task(self._keep_awake(), name="guard is awake")
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._has_ended = True
            watching.cancel()
            for tail in self._tails.values():
                tail.set_result(())
            self._tails.clear()
        status = await self._wait()
        await self._kill_orphans()
        return status

    async def stop(self) -> None:
        """Make the guard kill all its processes and exit. Wait until it has exited."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        await self._wait()

    def kill_now(self) -> None:
        """Stop the guard as `stop` does, but block. Use this only if `run` has never been called, or after `stop`."""
        self._socket.close()
        self._process.wait(END_TIMEOUT_S)

    async def _keep_awake(self) -> None:
        """Send SIGCONT whenever a signal has stopped the guard, so it can again stop ranks and report exits."""
        while True:
            await asyncio.sleep(AWAKE_EVERY_S)
            if process_tree.is_stopped(self.pid):
                log.warning(
                    "the guard (pid %d) was stopped by a signal; continuing it", self.pid, extra=event("guard_woken")
                )
                self._resume_guard()

    def _resume_guard(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def _check_end(self, number: int) -> None:
        if number in self._on_end and self._process.poll() is None:
            log.error("the guard (pid %d) does not respond; killing it", self.pid, extra=event("guard_killed"))
            self._process.kill()

    def _receive(self, event: dict[str, Any]) -> None:
        if "tail" in event:
            self._tails.pop(event["tail"]).set_result(_output(event))
            return
        number = event["ended"]
        cause = without_credentials(event["why"] or cause_of(event["error"]))
        self._on_end.pop(number)(Ended(event["status"], _output(event), cause))

    def _send(self, **order: Any) -> None:
        line = json.dumps(order).encode() + b"\n"
        if self._writer is None:
            self._unsent.append(line)
        elif not self._writer.is_closing():
            self._writer.write(line)

    async def _wait(self) -> int:
        self._resume_guard()
        ends_at = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while (status := self._process.poll()) is None:
            if asyncio.get_running_loop().time() >= ends_at:
                log.error("the guard (pid %d) does not exit; killing it", self.pid, extra=event("guard_killed"))
                self._process.kill()
                ends_at = math.inf
            await asyncio.sleep(0.005)
        return status

    async def _kill_orphans(self) -> None:
        """Kill the processes that a killed guard left behind.

        The guard's children died with it. The other descendants are now children of this process, a subreaper.
        """
        clock = asyncio.get_running_loop().time
        ends_at = clock() + END_TIMEOUT_S
        us = os.getpid()
        while clock() < ends_at:
            left = process_tree.descendants(us) if self._is_all else process_tree.marked_descendants(us, f"{self.pid}.")
            if not left:
                return
            process_tree.kill(left)
            await asyncio.sleep(SWEPT_EVERY_S)


def _output(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the output lines in a guard event, with credentials removed, because logs and incidents show them."""
    return tuple(map(without_credentials, event["output"]))


def cause_of(error_file: str) -> str:
    """Return the message in the content of an error file of torch's @record as one line, or an empty string."""
    try:
        message = json.loads(error_file)["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return " ".join(str(text).split())[:MAX_CAUSE_CHARS]


def format_output(output: Sequence[str]) -> str:
    return "".join(f"\n    | {line}" for line in output[-TAIL_LINES:])
