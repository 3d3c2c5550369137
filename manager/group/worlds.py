"""The loop's side of who is there: of the world, the ranks of all replica groups, the lighthouse tells, and the ranks
are told; which of the group's own are missing goes to the log."""

import asyncio
import logging

from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.messages.session import WatchRequest
from lighthouse_protocol.wire.watch_wire import watch_response_to_wire
from lighthouse_runtime.server.streams import Sender
from lighthouse_runtime.timing.sustained import Sustained

log = logging.getLogger(__name__)

# Ranks of one group come one after the other: only a wait that lasts is worth a line.
INCOMPLETE_LOGGED_AFTER_S = 10.0


class Worlds:
    """`world`: as it was told last; None: never."""

    def __init__(self) -> None:
        self.world: World | None = None
        self._takers: dict[int, Sender] = {}
        self._incomplete = Sustained(asyncio.get_running_loop(), _log_missing, _log_whole, INCOMPLETE_LOGGED_AFTER_S)

    def opened(self, watch: int, request: WatchRequest, sender: Sender) -> None:
        if request.takes_world:
            self._takers[watch] = sender
            if self.world is not None:
                sender.send(watch_response_to_wire(self.world))

    def ended(self, watch: int) -> None:
        self._takers.pop(watch, None)

    def tell(self, world: World) -> None:
        if world.pending and (self.world is None or world.pending != self.world.pending):
            log.info("ask to come in: %s", ", ".join(world.pending))
        self.world = world
        message = watch_response_to_wire(world)
        for sender in self._takers.values():
            sender.send(message)

    def look(self, incomplete: str) -> None:
        """Which ranks of the group are missing; empty: none, or all."""
        self._incomplete.set(incomplete)

    def close(self) -> None:
        self._incomplete.close()


def _log_missing(incomplete: str) -> None:
    log.warning("%s; a replica group takes part only when all its ranks are there", incomplete)


def _log_whole() -> None:
    log.info("no rank is waited for any more")
