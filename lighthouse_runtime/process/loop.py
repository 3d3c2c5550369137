"""A daemon's event loop, its background tasks, its stop signals, and notifications to systemd."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import uvloop

from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)


MIN_OPEN_FILES = 64  # a daemon opens about 30 for its loop, its ports, its journal and its first connections
MAX_OPEN_FILES = 65_536
NICE = -10
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's warnings, such as Slurm's --signal=USR1@120
_OWN_PACKAGES = frozenset({"lighthouse", "lighthouse_protocol", "lighthouse_runtime", "manager"})
_NOHUP = (signal.SIGHUP, signal.SIGQUIT)  # ignored from the start under nohup(1) and in some shells


def on_signals(
    loop: asyncio.AbstractEventLoop, stop: Callable[[int], object], warn: Callable[[int], object] | None = None
) -> None:
    """Call `stop` on each signal in STOP_SIGNALS and `warn` on each in WARNING_SIGNALS, with the signal's number."""
    for number in STOP_SIGNALS:
        if number not in _NOHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    if warn is not None:
        for number in WARNING_SIGNALS:
            loop.add_signal_handler(number, warn, number)


class StopRequest:
    """Event that stops a daemon, set by a stop signal or by calling the object. A second signal kills the process."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.status = 0

    def __call__(self, status: int = 0) -> None:
        """Request a stop with an exit status. Later calls do nothing."""
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
    """Run `main` on a new event loop and return the exit status. Stop signals set the StopRequest.

    Raises:
        LighthouseError: From `main`, or because the limit of open files is below MIN_OPEN_FILES.
    """
    _raise_open_files()
    _raise_priority()
    # Imported modules are permanent; the garbage of a round with a thousand groups has no cycles.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)

    async def supervised() -> int:
        stop = StopRequest()
        on_signals(asyncio.get_running_loop(), stop.on_signal)
        on_failed_callbacks(asyncio.get_running_loop(), stop)
        await main(stop)
        return stop.status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())


def start_part(work: Coroutine[Any, Any, None], name: str, end: Callable[[int], object] | None) -> asyncio.Task[None]:
    """Run a part of a daemon in a background task. If it fails, log the error and call `end` with exit status 1.

    Without this check, a failure would go unnoticed, because nothing awaits the task. `end` is None for a part that
    training does not need. If such a part fails, the daemon continues without it.
    """

    def check(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _report_failure(name, error, end)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(check)
    return task


def on_failed_callbacks(loop: asyncio.AbstractEventLoop, end: Callable[[int], object]) -> None:
    """If a callback of the event loop fails, log the error and call `end` with exit status 1.

    asyncio only logs it, and a timer that sets itself again would have stopped for good. Errors of libraries, and
    LighthouseErrors, which are not defects, are still only logged.
    """

    def check(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception) and _is_defect(error):
            _report_failure("a timer or callback", error, end)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(check)


def _is_defect(error: Exception) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return not isinstance(error, LighthouseError) and any(name.partition(".")[0] in _OWN_PACKAGES for name in modules)


def _report_failure(name: str, error: BaseException, end: Callable[[int], object] | None) -> None:
    outcome = "ends with it" if end is not None else "continues without it"
    log.critical("a defect has ended %s, and this process %s", name, outcome, exc_info=error,
                 extra=event("part_failed", part=name))  # fmt: skip
    if end is not None:
        end(1)


def announce(descriptor: int | None, text: object) -> None:
    """Report readiness to the parent by writing `text` to the pipe `descriptor`. Do nothing if there is no pipe."""
    if descriptor is not None:
        with open(descriptor, "w") as pipe:
            pipe.write(f"{text}\n")


def _raise_open_files() -> None:
    # Each connection takes a descriptor, and the soft limit is often 1024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if wanted < MIN_OPEN_FILES:
        few = f"{wanted} open files are too few; at least {MIN_OPEN_FILES} are needed"
        raise InvalidRequest(few, field="ulimit -n")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _raise_priority() -> None:
    # A daemon uses little CPU, but many ranks wait for its answers, so it should not queue behind data loaders. This
    # needs root, CAP_SYS_NICE or RLIMIT_NICE, and respects nice(1). Ranks do not inherit the priority, because a
    # process that started earlier forks them.
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)  # this thread and its later children


# Notifications to systemd (sd_notify): ready, status, stopping and the watchdog.
#
# They are sent only if NOTIFY_SOCKET names a socket. The event loop feeds the watchdog: if the loop hangs, systemd
# kills the process after WatchdogSec and restarts it.

FED_PER_TIMEOUT = 3  # systemd needs one; the spare ones tolerate a late turn of the loop
STATUS_EVERY_S = 3.0  # maximum age of the text in `systemctl status`


class ServiceManager:
    """Sends notifications to systemd, or to another service manager that uses the same protocol."""

    def __init__(self, timers: Timers, state: Callable[[], str] = str) -> None:
        """Read the socket and the watchdog's timeout from the environment.

        `state` returns the line that `systemctl status` shows. It is called at least every STATUS_EVERY_S.
        """
        self._timers = timers
        self._state = state
        self._last_state = ""
        self._address, self._watchdog_s = _read(os.environ, os.getpid())
        self._timer: Timer | None = None

    def ready(self) -> None:
        """Report that this process is ready, and start feeding the watchdog."""
        self._send(f"READY=1\n{self._status()}")
        self._feed_later()

    def stopping(self) -> None:
        """Report that this process is stopping. The watchdog is still fed until close()."""
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _feed_later(self) -> None:
        if self._address is not None:
            feed_s = math.inf if self._watchdog_s is None else self._watchdog_s / FED_PER_TIMEOUT
            self._timer = self._timers.call_later(min(feed_s, STATUS_EVERY_S), self._feed)

    def _feed(self) -> None:
        message = self._status() if self._watchdog_s is None else f"WATCHDOG=1\n{self._status()}"
        if message:
            self._send(message)
        self._feed_later()

    def _status(self) -> str:
        """Return the notification with the status line, or an empty string if the line has not changed."""
        state = " ".join(self._state().split())
        if state == self._last_state:
            return ""
        self._last_state = state
        return f"STATUS={state}\n"

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(), self._address)
        except OSError as e:
            fields = event("notify_failed", error=e.strerror)
            log.warning("cannot notify systemd (NOTIFY_SOCKET): %s", e.strerror or e, extra=fields)


def _read(environment: Mapping[str, str], pid: int) -> tuple[str | None, float | None]:
    """Return the address of systemd's socket, and the watchdog's timeout in seconds. Each is None if not set.

    `pid` is the pid of this process. A timeout that is set for another process is ignored.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return None, None
    address = "\0" + path[1:] if path.startswith("@") else path
    microseconds = environment.get("WATCHDOG_USEC", "")
    is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    watchdog_s = int(microseconds) / 1e6 if is_ours and microseconds.isascii() and microseconds.isdigit() else 0.0
    return address, watchdog_s or None
