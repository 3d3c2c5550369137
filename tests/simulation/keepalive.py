"""Who watches that the other end of a connection has not died without a word."""

from collections.abc import Callable

from tests.simulation.network import End
from tests.simulation.world import Process

PULSE_S = 0.25
KEEPALIVE_S = (1.0, 2.0)


class Keepalive:
    """Closes connections whose other end has not answered a probe for a while, and calls `ended`."""

    def __init__(self, process: Process, ended: Callable[[End], None]) -> None:
        self._process = process
        self._ended = ended
        self._patience: dict[End, float] = {}
        self._is_watching = False

    def watch(self, end: End) -> None:
        self._patience[end] = self._process.world.random.uniform(*KEEPALIVE_S)
        if not self._is_watching:
            self._is_watching = True
            self._process.after(PULSE_S, self._probe)

    def forget(self, end: End) -> None:
        self._patience.pop(end, None)

    def begin_anew(self) -> None:
        """The process was paused; nothing is known of the time before."""
        for end in self._patience:
            end.silent_since = None

    def _probe(self) -> None:
        now = self._process.world.now
        for end in list(self._patience):
            if not end.peer.is_silent():
                end.silent_since = None
            elif end.silent_since is None:
                end.silent_since = now
            elif now - end.silent_since > self._patience[end]:
                del self._patience[end]
                end.close()
                self._ended(end)
        self._is_watching = bool(self._patience)
        if self._patience:
            self._process.after(PULSE_S, self._probe)
