"""A process's stream to the lighthouse."""

from collections.abc import Callable
from typing import Any

from tests.simulation.lighthouse import Site
from tests.simulation.network import End, Keepalive, Network
from tests.simulation.world import Process


class Link:
    """A process's stream to the lighthouse. A failed attempt also calls `closed`."""

    def __init__(
        self,
        process: Process,
        network: Network,
        opened: Callable[[], None],
        heard: Callable[[Any], None],
        closed: Callable[[], None],
    ) -> None:
        self._process = process
        self._network = network
        self._opened = opened
        self._heard = heard
        self._closed = closed
        self._keepalive = Keepalive(process, self._ended)
        self._tries = 0
        self.end: End | None = None
        self.opened_at = 0.0

    @property
    def is_open(self) -> bool:
        return self.end is not None and self.end.is_open

    def open(self, site: Site[Any]) -> None:
        self._tries += 1
        number = self._tries
        site.connect(self._process, lambda end: self._connected(number, end), lambda: self._failed(number))

    def send(self, message: Any) -> None:
        if self.end is not None:
            self.end.send(message)

    def close(self) -> None:
        """Close from this side, without a call of `closed`."""
        self._tries += 1
        end, self.end = self.end, None
        if end is not None:
            self._keepalive.forget(end)
            end.close()

    def break_(self) -> None:
        """Break the connection in the network."""
        if self.end is not None:
            self._network.break_(self.end)

    def _connected(self, number: int, end: End) -> None:
        if number != self._tries:
            return end.close()
        self.end, self.opened_at = end, self._process.world.now
        end.on_message = lambda message: self._heard(message) if self.end is end else None
        end.on_end = lambda: self._ended(end)
        self._keepalive.watch(end)
        return self._opened()

    def _failed(self, number: int) -> None:
        if number == self._tries:
            self._closed()

    def _ended(self, end: End) -> None:
        if self.end is not end:
            return
        self._keepalive.forget(end)
        self.end = None
        self._closed()
