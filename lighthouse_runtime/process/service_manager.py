"""What systemd is told of this process (sd_notify): it serves, what it does, it stops, and its loop still runs.

Nothing is sent where NOTIFY_SOCKET names no socket. The watchdog is fed from the loop itself: if the loop hangs,
systemd kills the process after WatchdogSec and starts it again.
"""

import logging
import math
import os
import socket
from collections.abc import Callable, Mapping

from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers

log = logging.getLogger(__name__)

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
