"""Run a daemon: uvloop, and signals that ask it to stop."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping

import uvloop

from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)


MAX_OPEN_FILES = 65_536
NICE = -10
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler announces its end by (Slurm's --signal=USR1@120); their default would end a process."""
_NOHUP = (signal.SIGHUP, signal.SIGQUIT)  # nohup(1) and shells start a process that is to ignore these


def on_signals(
    loop: asyncio.AbstractEventLoop, stop: Callable[[int], object], warn: Callable[[int], object] | None = None
) -> None:
    """Call `stop` with the number of each stop signal, and `warn` with that of each warning signal."""
    for number in STOP_SIGNALS:
        if number not in _NOHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    if warn is not None:
        for number in WARNING_SIGNALS:
            loop.add_signal_handler(number, warn, number)


class StopRequest:
    """Set by the first stop signal, or by the daemon itself; a second signal ends the process at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.status = 0

    def __call__(self, status: int = 0) -> None:
        """Ask for a stop; the process ends with `status`. The first caller's status counts."""
        if not self._event.is_set():
            self.status = status
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def on_signal(self, number: int) -> None:
        if self._event.is_set():
            os._exit(128 + number)
        self()


def run_daemon(main: Callable[[StopRequest], Coroutine[None, None, None]]) -> int:
    """Run `main` until it returns; the exit status. A stop signal sets its StopRequest."""

    _raise_open_files()
    _go_first()
    # What was imported stays; what a round of a thousand groups allocates goes by reference counts.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)

    async def supervised() -> int:
        stop = StopRequest()
        on_signals(asyncio.get_running_loop(), stop.on_signal)
        await main(stop)
        return stop.status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())


def announce(descriptor: int | None, text: object) -> None:
    """To the process that has started this one, if it asks for that: this one serves."""
    if descriptor is not None:
        with open(descriptor, "w") as pipe:
            pipe.write(f"{text}\n")


def _raise_open_files() -> None:
    """A connection is a descriptor; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _go_first() -> None:
    """A daemon computes little, and many wait for what it says: it need not queue behind a host's data loaders. Where
    this process may (root, CAP_SYS_NICE, RLIMIT_NICE), and nobody has said otherwise by nice(1). Ranks are started by
    a process that began before this."""
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)  # of this thread, and of those that it starts


# -- service manager ----------------------------------------------------------
#
# What systemd is told of this process (sd_notify): it serves, what it does, it stops, and its loop still runs.
#
# Nothing is sent where NOTIFY_SOCKET names no socket. The watchdog is fed from the loop itself: if the loop hangs,
# systemd kills the process after WatchdogSec and starts it again.

FED_PER_TIMEOUT = 3
"""Twice more often than systemd asks for, so that one late turn of the loop is no failure."""
STATUS_EVERY_S = 3.0
"""What `systemctl status` shows is no older than this."""


class ServiceManager:
    """`timers`: the loop's. `state`: one line that says what the process does, read at least every STATUS_EVERY_S."""

    def __init__(self, timers: Timers, state: Callable[[], str] = str) -> None:
        self._timers = timers
        self._state = state
        self._told = ""
        self._address, self._watchdog_s = _read(os.environ, os.getpid())
        self._timer: Timer | None = None

    def ready(self) -> None:
        """This process serves. From now on the watchdog is fed."""
        self._send(f"READY=1\n{self._status()}")
        self._feed_later()

    def stopping(self) -> None:
        """It no longer does, and ends soon. The watchdog is fed until it has."""
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _feed_later(self) -> None:
        if self._address is not None:
            feed_s = math.inf if self._watchdog_s is None else self._watchdog_s / FED_PER_TIMEOUT
            self._timer = self._timers.call_later(min(feed_s, STATUS_EVERY_S), self._feed)

    def _feed(self) -> None:
        told = self._status() if self._watchdog_s is None else f"WATCHDOG=1\n{self._status()}"
        if told:
            self._send(told)
        self._feed_later()

    def _status(self) -> str:
        """Only where it has changed."""
        state = " ".join(self._state().split())
        if state == self._told:
            return ""
        self._told = state
        return f"STATUS={state}\n"

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(), self._address)
        except OSError as e:
            told = event("notify_failed", error=e.strerror)
            log.warning("cannot notify systemd (NOTIFY_SOCKET): %s", e.strerror or e, extra=told)


def _read(environment: Mapping[str, str], pid: int) -> tuple[str | None, float | None]:
    """The address of systemd's socket, and the watchdog's timeout in seconds; None: there is none for this process."""
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return None, None
    address = "\0" + path[1:] if path.startswith("@") else path
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    watchdog_s = int(microseconds) / 1e6 if is_ours and microseconds.isascii() and microseconds.isdigit() else 0.0
    return address, watchdog_s or None
