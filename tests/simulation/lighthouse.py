"""A lighthouse: its place, which outlives a process, and one life of it. Both simulators build on these classes.

A lighthouse can die before each write and before each message.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tests.simulation.network import LIGHTHOUSE_HOST, End, Keepalive, Network
from tests.simulation.world import Died, Process, World

BACK_AFTER_CRASH_S = (0.05, 0.5, 2.0)


class LighthouseProcess(Process):
    """One life: its streams and its crashes."""

    def __init__(self, site: "Site[Any]", name: str) -> None:
        super().__init__(site.world, name, site.host)
        self._place = site
        self.keepalive = Keepalive(self, self.stream_ended)
        self._crash_in: int | None = None
        self._armed: int | None = None
        self.on_death.append(self._die)

    # -- streams

    def accept(self, end: End) -> None:
        end.on_message = lambda message: self.receive(end, message)
        end.on_end = lambda: self.stream_ended(end)
        self.keepalive.watch(end)

    def receive(self, end: End, message: Any) -> None:
        raise NotImplementedError

    def stream_ended(self, end: End) -> None:
        self.keepalive.forget(end)

    def close_stream(self, end: End) -> None:
        """Close from this side. The stream's handler returns after that."""
        end.close()
        self.after(0, self.stream_ended, end)

    def pause(self, for_s: float) -> None:
        super().pause(for_s)
        self.after(for_s, self.wake, for_s)

    def wake(self, for_s: float) -> None:
        """Go on after a pause."""
        self.keepalive.restart()

    # -- its end

    def arm_crash(self, effects: int, patience_s: float) -> None:
        """Die after that many writes and messages from the next record on, or from any moment after `patience_s`."""
        self._armed = effects
        self.after(patience_s, self.fire_crash)

    def fire_crash(self) -> None:
        if self._armed is not None:
            self._crash_in, self._armed = self._armed, None

    def may_die(self) -> None:
        """Die here if an armed crash is due."""
        if self._crash_in is None:
            return
        self._crash_in -= 1
        if self._crash_in < 0:
            self.world.counts["crashed while telling"] += 1
            self.die("crashes", self.world.random.choice(BACK_AFTER_CRASH_S))

    def die(self, why: str, back_after_s: float) -> None:
        self.log(why)
        self._place.kill(back_after_s)
        raise Died

    def _die(self) -> None:
        self.log("is killed")
        self._place.network.end_all(self)


P = TypeVar("P", bound=LighthouseProcess)


class Site(Generic[P]):
    """Where a lighthouse runs."""

    def __init__(self, world: World, network: Network, host: str = LIGHTHOUSE_HOST) -> None:
        self.world = world
        self.network = network
        self.host = host
        self.process: P | None = None
        self.starts = 0
        self.up_since = 0.0
        self.refuses_until = 0.0
        """The time until which something on the way refuses new connections."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_up

    def create(self) -> P:
        raise NotImplementedError

    def connect(
        self, client: Process, connected: Callable[[End], None], failed: Callable[[], None], *, shadowed_s: float = 0.0
    ) -> None:
        """Open a stream to the process that runs when the connection arrives (Network.connect)."""
        process = self.process if self.world.now >= self.refuses_until else None
        self.network.connect(client, process, self._accept, connected, failed, shadowed_s=shadowed_s)

    def _accept(self, end: End) -> None:
        if self.process is not None:
            self.process.accept(end)

    def start(self) -> None:
        if not self.is_up:
            self.network.boot(self.host)
            self.starts += 1
            self.process = self.create()
            self.up_since = self.world.now

    def kill(self, back_after_s: float) -> None:
        if self.process is not None:
            self.process.kill()
        self.world.after(back_after_s, self.start)
