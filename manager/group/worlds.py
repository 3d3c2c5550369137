"""The world, all replica groups with their ranks: the lighthouse tells it to the manager, and the manager to its ranks.
Which ranks of this group are missing goes to the log, and to those that are there."""

import logging

from lighthouse_protocol.messages.membership import World
from lighthouse_protocol.messages.session import Waiting
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.sustained import Sustained
from manager.group.watches import Watch, WatchTable

log = logging.getLogger(__name__)

# Ranks of one group come one after the other: only a wait that lasts is worth a line.
INCOMPLETE_LOGGED_AFTER_S = 10.0


class Worlds:
    """`world` is the newest; None: the lighthouse has told none."""

    def __init__(self, timers: Timers, watches: WatchTable) -> None:
        self.world: World | None = None
        self._watches = watches
        self._incomplete = Sustained(timers, self._say_missing, _log_whole, INCOMPLETE_LOGGED_AFTER_S)

    def opened(self, watch: Watch) -> None:
        if self.world is not None:
            watch.peer.send(self.world)

    def tell(self, world: World) -> None:
        if world.pending and (self.world is None or world.pending != self.world.pending):
            told = event("groups_join", groups=world.peers_pending)
            log.info("waiting to join: %s", world.who_joins, extra=told)
        self.world = world
        for watch in self._watches:
            watch.peer.send(world)

    def miss(self, incomplete: str) -> None:
        """Which ranks of the group are missing; empty: none, or all."""
        self._incomplete.set(incomplete)

    def close(self) -> None:
        self._incomplete.close()

    def _say_missing(self, incomplete: str) -> None:
        """Log it, and tell the ranks that are there: they may wait for the others before they ask for a quorum."""
        log.warning(
            "%s; a replica group joins only when all its ranks are connected", incomplete, extra=event("ranks_missing")
        )
        self._watches.send_all(Waiting(incomplete))


def _log_whole() -> None:
    log.info("all ranks of the group are connected", extra=event("ranks_complete"))
