"""The guard's end of preload.py: the interpreter that ranks are forked from, and the ranks that wait for it."""

import functools
import json
import os
import selectors
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.guard.child import Child
from manager.guard.rules import described

NUMBER = 0  # no order has it
MAX_FAILURES = 3
_SCRIPT = str(Path(__file__).with_name("preload.py"))
_READ_BYTES = 1 << 16
_PATIENCE_S = 5.0


@dataclass(slots=True, eq=False)
class _Fork:
    """A rank that is to be forked. `socket` and `output` are there while that is asked for."""

    child: Child
    more: Mapping[str, str]
    socket: "socket.socket | None" = None
    output: int = -1
    failures: int = 0

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the guard does. `keep`: look after that process from now on; `fail`: no rank can be forked, and why."""

    keep: Callable[[Child], None]
    fail: Callable[[str], None]
    say: Callable[[str, str], None]


class Preloader:
    def __init__(self, order: Mapping[str, Any], folder: Path, selector: selectors.BaseSelector, hooks: Hooks) -> None:
        self._interpreter: Sequence[str] = order["interpreter"]
        self._program: Sequence[str] = order["program"]
        self._modules = ",".join(order["preload"])
        self._label: str = order["label"]
        self._folder = folder
        self._selector = selector
        self._hooks = hooks
        self._control: socket.socket | None = None
        self._is_ready = False
        self._has_been_ready = False
        self._has_failed = False
        self._deaths = 0
        self._waiting: deque[_Fork] = deque()
        self._asked: dict[int, _Fork] = {}

    @property
    def has_asked(self) -> bool:
        """A process of which the guard knows nothing may be one of its ranks."""
        return bool(self._asked)

    def begin(self) -> None:
        self._has_been_ready = False
        ours, its = socket.socketpair()
        child = Child(NUMBER, self._label, True, None, self._folder / "preload.json")
        words = [_SCRIPT, str(its.fileno()), str(os.getpid()), self._modules]
        with its:
            try:
                child.spawn([*self._interpreter, *words, *self._program], {}, has_input=False, keeps=(its.fileno(),))
            except (OSError, subprocess.SubprocessError) as e:
                ours.close()
                self._fail(f"cannot run {self._interpreter[0]}: {e}")
                return
        self._control = ours
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        self._hooks.keep(child)

    def want(self, child: Child, more: Mapping[str, str]) -> None:
        """`child` is kept once it runs."""
        self._waiting.append(_Fork(child, more))
        self._ask()

    def drop(self, number: int) -> bool:
        """Whether that start was still to come; it comes no more."""
        fork = self._asked.pop(number, None) or next(
            (each for each in self._waiting if each.child.number == number), None
        )
        if fork is None:
            return False
        if fork in self._waiting:
            self._waiting.remove(fork)
        self._close(fork)  # a process that gets no order ends
        fork.child.close()
        return True

    def ended(self, status: int) -> None:
        """The interpreter has; its ranks go on."""
        self._hear()  # its last word may be unread: what is ready in one moment comes in any order
        self._forget_control()
        asked, self._asked = self._asked, {}
        for fork in reversed(asked.values()):
            self._again(fork)
        self._deaths = 0 if self._has_been_ready else self._deaths + 1
        how = described(status)
        if self._deaths >= MAX_FAILURES:
            self._fail(f"{self._modules}: their import has ended the interpreter by {how}, {MAX_FAILURES} times")
        if not self._has_failed:
            self._hooks.say(self._label, f"died: {how}; restarting it, and ranks wait to start")
            self.begin()

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._hooks.fail(why)

    def _hear(self) -> None:
        if self._control is None:
            return
        try:
            said = self._control.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            said = b""
        if not said:
            self._forget_control()  # its end follows
            return
        event = json.loads(said)
        if "failed" in event:
            self._fail(event["failed"])
            return
        self._is_ready = self._has_been_ready = True
        self._ask()

    def _forget_control(self) -> None:
        self._is_ready = False
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None

    # -- forks

    def _ask(self) -> None:
        while self._is_ready and self._control is not None and self._waiting:
            fork = self._waiting.popleft()
            fork.socket, its = socket.socketpair()
            fork.socket.settimeout(_PATIENCE_S)
            fork.output, output = os.pipe()
            try:
                socket.send_fds(self._control, [b"f"], [its.fileno(), output])
            except OSError:
                self._is_ready = False  # its end follows
                fork.close()
                self._waiting.appendleft(fork)
            else:
                self._asked[fork.child.number] = fork
                self._selector.register(fork.socket, selectors.EVENT_READ, functools.partial(self._heard_of, fork))
            finally:
                its.close()
                os.close(output)

    def _heard_of(self, fork: _Fork) -> None:
        if fork.socket is None:
            return  # given up by what else was ready in this moment
        del self._asked[fork.child.number]
        try:
            pid = int(fork.socket.recv(_READ_BYTES) or 0)
            if pid:
                order = {"env": fork.child.environment(fork.more), "mark": fork.child.mark}
                fork.socket.sendall(json.dumps(order).encode())
        except OSError:
            pid = 0
        if not pid:
            self._again(fork)
            self._ask()
            return
        output, fork.output = fork.output, -1
        self._close(fork)
        fork.child.born(pid, output)
        self._hooks.keep(fork.child)

    def _again(self, fork: _Fork) -> None:
        self._close(fork)
        fork.failures += 1
        self._waiting.appendleft(fork)
        if fork.failures >= MAX_FAILURES:
            self._fail(f"{self._modules}: no rank can be forked from the interpreter that has imported them")

    def _close(self, fork: _Fork) -> None:
        if fork.socket is not None:
            self._selector.unregister(fork.socket)
        fork.close()
