"""Run a daemon: uvloop, and signals that ask it to stop."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
from collections.abc import Callable, Coroutine

import uvloop

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
