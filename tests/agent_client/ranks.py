"""Processes with torch imported, forked in milliseconds from one helper interpreter, that do what a test tells them, or
run a script.

    with RankServer() as server, server.start("tests.agent_client.actors:GlooActor") as rank:
        rank.call("meet", "key", 0, 2)                  # GlooActor().meet(...), in a process of its own
        reduced = rank.begin("all_reduce", 1, 100)      # without waiting for it
        rank.call("abort")                              # beside it: each call has a thread
        reduced.result(within_s=5.0)

pytest's own process is never forked: it has threads. Everything started here ends with its block, and by the kernel if
the tests are killed.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.processes import PATIENCE_S, ROOT, clean_environment, eventually

# torch's TCPStore asks for the name of each new client's address, and a name server may take its time: 5 s at worst.
WITHOUT_DNS = {"RES_OPTIONS": "attempts:0"}

STACKS_WITHIN_S = 2.0
"""A rank that hangs writes where its threads are into its log."""

_PR_SET_PDEATHSIG = 1
_PRELOADED = ("torch._dynamo", "tests.agent_client.actors")  # torch's optimizers import the first when first used
_MAX_ORDER_BYTES = 65536
_STATUS = 0
"""The number of the answer in which a script's process tells its exit status."""


class RankError(AssertionError):
    """A call raised in the rank; `kind` is the name of the class, `trace` where."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind = kind
        self.text = text


class RankEnded(AssertionError):
    """The process ended, or was killed, before it answered."""


class Pending:
    """A call under way in a rank."""

    def __init__(self, rank: "Rank", number: int, what: str) -> None:
        self._rank = rank
        self._number = number
        self._what = what

    def is_done(self, within_s: float = 0.0) -> bool:
        return self._rank.has_answer(self._number, within_s)

    def result(self, within_s: float = PATIENCE_S) -> Any:
        """Raises RankError, RankEnded, and AssertionError when the time is over."""
        if not self.is_done(within_s):
            self._rank.signal(signal.SIGUSR1)
            self.is_done(STACKS_WITHIN_S)
            raise AssertionError(f"{self._what} of rank {self._rank.pid} goes on after {within_s:g} s; see its log")
        is_good, value = self._rank.take(self._number)
        if not is_good:
            raise RankError(*value)
        return value


class Rank:
    """A forked process that holds one actor, or runs one script. For one thread of the test at a time."""

    def __init__(self, pid: int, channel: Connection) -> None:
        self.pid = pid
        self._channel = channel
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.close()

    @property
    def is_alive(self) -> bool:
        """Neither gone nor a zombie; one that is stopped lives."""
        return state_of(self.pid) not in ("", "Z")

    @property
    def status(self) -> int | None:
        """Of a script: None while it runs, and as of a shell's child after that."""
        try:
            return self._answers[_STATUS][1] if self.has_answer(_STATUS, 0.0) else None
        except RankEnded:
            return -signal.SIGKILL

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        number = next(self._numbers)
        with contextlib.suppress(OSError):  # it has ended: result() says so
            self._channel.send((number, method, args, kwargs))
        return Pending(self, number, method)

    def call(self, method: str, *args: Any, within_s: float = PATIENCE_S, **kwargs: Any) -> Any:
        return self.begin(method, *args, **kwargs).result(within_s)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: state_of(self.pid) == "T", f"rank {self.pid} is stopped")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when its sockets are closed."""
        if not self._has_ended:
            self.signal(signal.SIGKILL)
            eventually(lambda: self._receive(0.05) is None, f"rank {self.pid} is gone")

    def has_answer(self, number: int, within_s: float) -> bool:
        ends_at = time.monotonic() + within_s
        while number not in self._answers:
            left_s = ends_at - time.monotonic()
            if self._receive(max(0.0, left_s)) is None:
                raise RankEnded(f"rank {self.pid} has ended")
            if left_s <= 0:
                return number in self._answers
        return True

    def take(self, number: int) -> tuple[bool, Any]:
        return self._answers.pop(number)

    def _receive(self, within_s: float) -> bool | None:
        """Whether an answer came; None at the end of the process."""
        if self._has_ended:
            return None
        try:
            if not self._channel.poll(within_s):
                return False
            number, is_good, value = self._channel.recv()
        except (EOFError, ConnectionResetError):
            self._has_ended = True
            return None
        self._answers[number] = (is_good, value)
        return True


class RankServer:
    """The helper interpreter; use as a context manager, from any thread. `preloaded`: more modules that it imports.
    `within`: a command that runs it elsewhere, as in a network namespace."""

    def __init__(self, *preloaded: str, within: Sequence[str] = ()) -> None:
        self._preloaded, self._within = preloaded, within
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), *self._preloaded]
            self._process = subprocess.Popen(
                [*self._within, sys.executable, "-m", "tests.agent_client.ranks", *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=clean_environment(OMP_NUM_THREADS="1", **WITHOUT_DNS),
            )
        self._orders.settimeout(2 * PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.wait(PATIENCE_S)

    def start(self, actor: str, log: Path | None = None) -> Rank:
        """A new process with one `actor`, "module:Class"; what it writes goes to `log`, or nowhere."""
        return self._start({"actor": actor}, log)

    def run(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Rank:
        """A new process that runs the script as its main module."""
        return self._start({"script": [str(script), *arguments], "environment": dict(environment)}, log)

    def _start(self, order: dict[str, Any], log: Path | None) -> Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            told = json.dumps(order | {"log": str(log or os.devnull)}).encode()
            with self._lock:
                socket.send_fds(self._orders, [told], [theirs.fileno()])
                pid = int(self._orders.recv(64) or b"0")
        assert pid, f"the rank server ended with {self._process.wait(PATIENCE_S)}; its last words stand above"
        return Rank(pid, Connection(ours.detach()))


def state_of(pid: int) -> str:
    """One letter, as in ps; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


Start = Callable[[int, str], list[Rank]]
"""The fixture `start`: so many processes with that actor, "module:Class", that end with their test."""


def together(ranks: Iterable[Rank], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """What each returns, all of them being called before the first is waited for."""
    return [pending.result() for pending in [rank.begin(method, *args, **kwargs) for rank in ranks]]


# -- in the helper, and in the ranks


def _main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for name in (*_PRELOADED, *sys.argv[3:]):
        importlib.import_module(name)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 1)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(json.loads(order), descriptors[0])
        os.close(descriptors[0])
        orders.send(str(pid).encode())


def _become(order: dict[str, Any], descriptor: int) -> NoReturn:
    """In the child: run the script, or serve the actor's methods until the test closes its end."""
    try:
        _die_with(os.getppid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target in (1, 2):
            os.dup2(output, target)
        os.close(output)
        if "script" in order:
            _run(order["script"], order["environment"], Connection(descriptor))
        faulthandler.register(signal.SIGUSR1)  # kill -USR1: where its threads are, into its log
        module, _, name = order["actor"].partition(":")
        _serve(getattr(importlib.import_module(module), name)(), Connection(descriptor))
    except BaseException:  # noqa: BLE001  its last words belong into its log
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _run(program: list[str], environment: dict[str, str], channel: Connection) -> NoReturn:
    """To its end, and the process ends whatever it does."""
    os.environ.update(environment)
    status = 1
    try:
        sys.argv, sys.path[0] = program, os.path.dirname(program[0])
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # random reseeds itself after a fork, numpy does not
        runpy.run_path(program[0], run_name="__main__")
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001  its last words belong into its log
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send((_STATUS, True, status))
    os._exit(status)


def _serve(actor: object, channel: Connection) -> None:
    lock = threading.Lock()

    def run(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            answer: tuple[bool, Any] = True, getattr(actor, method)(*args, **kwargs)
        except BaseException as e:  # noqa: BLE001  it belongs to the test
            answer = False, (type(e).__name__, str(e), traceback.format_exc())
        with lock, contextlib.suppress(OSError):
            channel.send((number, *answer))

    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            threading.Thread(target=run, args=channel.recv(), daemon=True).start()


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    _main()
