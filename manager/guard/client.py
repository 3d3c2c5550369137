"""The supervisor's end of the guard: orders to it, and what has become of the processes that it started."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lighthouse_runtime.log_event import event
from lighthouse_runtime.process import grpc_environment
from lighthouse_runtime.process.logs import without_credentials
from manager.guard import process_tree

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
AWAKE_EVERY_S = 0.5
SWEPT_EVERY_S = 0.01
MAX_CAUSE_CHARS = 500

# Only the standard library, and then our own folder: nothing of the user's can stand in the way.
_CODE = "import sys; sys.path.append(sys.argv.pop()); from manager.guard.guard import main; main()"
_OURS = str(Path(__file__).resolve().parents[2])
_RANK_SITE = str(Path(__file__).resolve().with_name("rank_site"))


@dataclass(frozen=True, slots=True)
class Command:
    """`env` is added to the supervisor's own. `log`: a file that takes its output, which is shown as well if
    `is_shown`. `has_input`: its standard input stays open, and closes with the guard."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    label: str
    log: str | None = None
    is_shown: bool = True
    has_input: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` as subprocess gives it. `cause`: why the guard has killed it, or what an error file of torch's @record
    says."""

    status: int
    output: tuple[str, ...]
    cause: str = ""


class GuardClient:
    """manager/guard/guard.py as a child process. To be started before gRPC is used, and attached to the loop."""

    def __init__(self, *, observes: bool = False, is_all: bool = False) -> None:
        """`observes`: scripts that make a process group are observed. `is_all`: this process starts others by the guard
        alone: all that a killed guard leaves is killed, whatever it has made of itself."""
        ours, its = socket.socketpair()
        command = [sys.executable, "-P", "-S", "-E", "-c", _CODE, str(its.fileno()), str(os.getpid()), _OURS]
        env = grpc_environment.without_our_defaults(os.environ)
        with its:
            self._process = subprocess.Popen(
                command,
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_with_rank_site(env) if observes else env,
            )
        process_tree.become_subreaper()  # for what a guard that is killed leaves behind
        self._socket = ours
        self._is_all = is_all
        self._numbers = itertools.count(1)
        self._on_end: dict[int, Callable[[Ended], None]] = {}
        self._tails: dict[int, asyncio.Future[tuple[str, ...]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._has_ended = False
        self._unsent: list[bytes] = []  # from before run()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, command: Command, on_end: Callable[[Ended], None]) -> int:
        """Its number. `on_end` is called on the loop when nothing of it runs any more."""
        number = next(self._numbers)
        self._on_end[number] = on_end
        self._say(
            start=number,
            argv=command.argv,
            env=dict(command.env),
            label=command.label,
            log=command.log,
            is_shown=command.is_shown,
            has_input=command.has_input,
        )
        return number

    def halt(self, number: int, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to what is left of it after `grace_s`. A guard that does not see to that is killed, and
        what it has started with it."""
        self._wake()
        self._say(halt=number, grace_s=grace_s)
        asyncio.get_running_loop().call_later(grace_s + END_TIMEOUT_S, self._check_end, number)

    def pass_on(self, number: int, signal_number: int) -> None:
        """Send a signal to those processes of it that handle it."""
        self._say(**{"signal": number, "pass": signal_number})

    async def tail(self, number: int) -> tuple[str, ...]:
        """The last lines that it has written so far; it may have ended. None where the guard has."""
        if self._has_ended:
            return ()
        if number not in self._tails:
            self._tails[number] = asyncio.get_running_loop().create_future()
            self._say(tail=number)
        return await asyncio.shield(self._tails[number])

    async def run(self) -> int:
        """Call what waits for the ends of processes; returns, with the guard's own status, when the guard has ended."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        self._writer.writelines(self._unsent)
        watching = asyncio.create_task(self._keep_awake(), name="guard is awake")
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._has_ended = True
            watching.cancel()
            for tail in self._tails.values():
                tail.set_result(())
            self._tails.clear()
        status = await self._wait()
        await self._sweep()
        return status

    async def stop(self) -> None:
        """All that it has started is killed, and it ends."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        await self._wait()

    def kill_now(self) -> None:
        """For a supervisor that does not come to run(): blocks until nothing of it is left."""
        self._socket.close()
        self._process.wait(END_TIMEOUT_S)

    async def _keep_awake(self) -> None:
        """A guard that is stopped neither ends ranks nor tells of their ends."""
        while True:
            await asyncio.sleep(AWAKE_EVERY_S)
            if process_tree.is_stopped(self.pid):
                log.warning(
                    "the guard (pid %d) was stopped by a signal; continuing it", self.pid, extra=event("guard_woken")
                )
                self._wake()

    def _wake(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def _check_end(self, number: int) -> None:
        if number in self._on_end and self._process.poll() is None:
            log.error("the guard (pid %d) does not respond; killing it", self.pid, extra=event("guard_killed"))
            self._process.kill()

    def _hear(self, event: dict[str, Any]) -> None:
        if "tail" in event:
            self._tails.pop(event["tail"]).set_result(_output(event))
            return
        number = event["ended"]
        cause = without_credentials(event["why"] or cause_of(event["error"]))
        self._on_end.pop(number)(Ended(event["status"], _output(event), cause))

    def _say(self, **order: Any) -> None:
        line = json.dumps(order).encode() + b"\n"
        if self._writer is None:
            self._unsent.append(line)
        elif not self._writer.is_closing():
            self._writer.write(line)

    async def _wait(self) -> int:
        self._wake()
        ends_at = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while (status := self._process.poll()) is None:
            if asyncio.get_running_loop().time() >= ends_at:
                log.error("the guard (pid %d) does not end; killing it", self.pid, extra=event("guard_killed"))
                self._process.kill()
            await asyncio.sleep(0.005)
        return status

    async def _sweep(self) -> None:
        """What a guard that was killed has left: its own children died with it, theirs are ours now."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + END_TIMEOUT_S
        while (left := self._left()) and clock() < ends_at:
            process_tree.kill(left)
            await asyncio.sleep(SWEPT_EVERY_S)

    def _left(self) -> list[int]:
        us = os.getpid()
        return process_tree.descendants(us) if self._is_all else process_tree.marked(us, f"{self.pid}.")


def _output(event: Mapping[str, Any]) -> tuple[str, ...]:
    """What a process has written last goes into logs, incidents and debug bundles."""
    return tuple(map(without_credentials, event["output"]))


def cause_of(error_file: str) -> str:
    """What an error file of torch's @record says, in one line."""
    try:
        message = json.loads(error_file)["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(str(text).split())[:MAX_CAUSE_CHARS]


def shown(output: Sequence[str]) -> str:
    return "".join(f"\n    | {line}" for line in output)


def _with_rank_site(variables: Mapping[str, str]) -> dict[str, str]:
    """What runs in each Python below the guard before its script does; the guard itself does not look there."""
    path = filter(None, (_RANK_SITE, variables.get("PYTHONPATH")))
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}
