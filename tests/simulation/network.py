"""Hosts, the ways between them, and connections: delay, order, silence and ends.

A connection keeps the order in both directions. During a cut between two hosts, messages wait. A broken connection
loses messages in transit and ends at both sides, each after a delay. The host of a killed process closes its
connections. The connections of a host that lost its power stay open.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.world import Process, World

LIGHTHOUSE_HOST = "lighthouse"
LOCAL_DELAY_S = 0.0003
CONNECT_TIMEOUT_S = 5.0
RESET_WITHIN_S = 0.003
LATE_SHARE, LATE_FACTOR = 0.02, 20
KEEPALIVE_EVERY_S = 0.25
KEEPALIVE_TIMEOUT_S = (1.0, 2.0)
_END = object()


class End:
    """One end of a connection. What is sent here arrives at `peer`."""

    def __init__(
        self, network: "Network", process: Process, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._network = network
        self.process = process
        self.on_message = on_message
        self.on_end = on_end
        self.peer: End = self
        self.is_open = True
        self.silent_since: float | None = None
        self._arrives_at = 0.0
        self.shadow: End | None = None
        self._held_until = 0.0
        self._stalled: deque[Any] = deque()
        self._losses = 0

    def send(self, message: Any) -> None:
        if self.is_open:
            self._network.world.sends(self.process.name, self.peer.process.name, message)
            self._transmit(message)
            if self.shadow is not None:
                self.shadow.send(message)

    def close(self) -> None:
        """End in good order: everything that was sent arrives before the end."""
        if self.is_open:
            self.is_open = False
            self.finish()

    def finish(self) -> None:
        self._transmit(_END)

    def hold(self, until: float) -> None:
        """Delay everything that was sent, or will be, until then."""
        self._held_until = until

    def cease(self) -> None:
        """Deliver nothing more, not even the end."""
        self._losses += 1
        self._stalled.clear()

    def lose(self) -> None:
        """Drop messages in transit and deliver the end."""
        self.cease()
        self._transmit(_END)

    def resume(self) -> None:
        """Send what waited for the end of a cut."""
        stalled, self._stalled = self._stalled, deque()
        for item in stalled:
            self._transmit(item)

    @property
    def waits(self) -> bool:
        """True if messages that were sent here wait for the end of a cut."""
        return bool(self._stalled)

    def is_silent(self) -> bool:
        """Return whether a probe from the peer would get no answer."""
        process, network = self.process, self._network
        is_cut = network.is_cut(process.host, self.peer.process.host) or network.is_cut(
            self.peer.process.host, process.host
        )
        return is_cut or process.is_paused or not process.is_up

    def _transmit(self, item: Any) -> None:
        network, to = self._network, self.peer.process
        if self._stalled:
            self._stalled.append(item)
            return None
        world = network.world
        leaves_at = max(world.now, self.process.held_until)  # it may have been held up since this moment began
        if to in network.rebooted:
            return world.at(leaves_at + 2 * network.delay_s(), self.process, self.reset)
        self._arrives_at = max(self._arrives_at, leaves_at + network.delay_s())
        return world.at(self._arrives_at, to, self._arrive, item, self._losses)

    def reset(self) -> None:
        """End at once, because the peer's host has restarted or a proxy has closed the connection."""
        if self.is_open:
            self.is_open = False
            self._network.forget(self)
            self.on_end()

    def _arrive(self, item: Any, losses: int) -> None:
        peer = self.peer
        if losses != self._losses or not peer.is_open:
            return
        if self._network.world.now < self._held_until:
            self._network.world.at(self._held_until, peer.process, self._arrive, item, losses)
            return
        if self._stalled or self._network.is_cut(self.process.host, peer.process.host):
            self._stalled.append(item)
            self._network.remember(self)  # the end that came the other way may have been the last heard of it
            return
        if item is not _END:
            peer.on_message(item)
            return
        self._network.forget(self)
        self._network.forget(peer)
        peer.is_open = False
        peer.on_end()


class Network:
    def __init__(self, world: World, delay_s: float) -> None:
        self.world = world
        self._delay_s = delay_s
        self._cuts: dict[tuple[str, str], int] = {}
        self._ends: dict[End, None] = {}
        self._ends_of: dict[Process, dict[End, None]] = {}
        self._vanished: dict[str, list[Process]] = {}
        self.rebooted: set[Process] = set()

    def delay_s(self) -> float:
        draw = self.world.random.random()
        return self._delay_s * (0.5 + draw) * (LATE_FACTOR if draw < LATE_SHARE else 1)

    # -- cuts

    def is_cut(self, source: str, target: str) -> bool:
        return bool(self._cuts) and (source, target) in self._cuts

    def cut(self, source: str, target: str) -> None:
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        left = self._cuts[source, target] - 1
        if left:
            self._cuts[source, target] = left
            return
        del self._cuts[source, target]
        for end in list(self._ends):
            if (end.process.host, end.peer.process.host) == (source, target):
                end.resume()

    def cut_for(self, for_s: float, ways: Iterable[tuple[str, str]]) -> None:
        for way in ways:
            self.cut(*way)
            self.world.after(for_s, self.mend, *way)

    # -- connections

    def connect(
        self,
        client: Process,
        server: Process | None,
        accept: Callable[[End], None],
        connected: Callable[[End], None],
        failed: Callable[[], None],
        *,
        shadowed_s: float = 0.0,
    ) -> None:
        """Open a connection.

        `accept` gives the server's end its callbacks, `connected` the client's. For `shadowed_s`, a second connection
        repeats what the client sends, and drops what the server answers there.
        """
        there = client.world.now + self.delay_s()
        if server is None or not server.is_up:
            return client.world.at(there + self.delay_s(), client, failed)
        if self.is_cut(client.host, server.host) or self.is_cut(server.host, client.host):
            return client.after(CONNECT_TIMEOUT_S * self.world.random.uniform(0.2, 1), failed)
        is_done: list[bool] = []

        def time_out() -> None:
            if not is_done:
                is_done.append(False)
                failed()

        def take() -> None:
            if is_done:
                return
            mine, theirs = self._pair(client, server)
            accept(theirs)
            if shadowed_s:
                mine.shadow, second = self._pair(client, server)
                accept(second)
                self.world.after(shadowed_s, mine.shadow.close)
            client.world.at(client.world.now + self.delay_s(), client, hand, mine)

        def hand(mine: End) -> None:
            if is_done:
                return mine.close()
            is_done.append(True)
            return connected(mine) if mine.is_open else failed()

        client.world.at(there, server, take)
        client.after(CONNECT_TIMEOUT_S, time_out)
        return None

    def break_(self, end: End) -> None:
        """End a connection at both sides and drop messages in transit."""
        end.lose()
        end.peer.lose()

    def close_all(self, process: Process) -> None:
        """Reset all connections of a process at once, as a proxy does. The process itself continues."""
        for end in list(self._ends_of.get(process, ())):
            end.lose()
            end.peer.cease()
            self.world.at(self.world.now + self.world.random.uniform(0, RESET_WITHIN_S), process, end.reset)

    def linger(self, end: End, for_s: float) -> None:
        """End a connection at this side only. Messages in transit and the end reach the other side after `for_s`."""
        if end.is_open:
            end.hold(self.world.now + for_s)
            end.close()
            self.forget(end)
            end.process.after(self.delay_s(), end.on_end)

    def end_all(self, process: Process) -> None:
        """Close all connections of a process that was killed."""
        for end in list(self._ends_of.pop(process, ())):
            if end.is_open:
                end.is_open = False
                end.lose() if self.world.random.random() < 0.5 else end.finish()

    def vanish(self, process: Process) -> None:
        """Drop all connections of a host that lost its power. Its peers are not notified."""
        for end in list(self._ends_of.pop(process, ())):
            end.is_open = False
            end.cease()
        self._vanished.setdefault(process.host, []).append(process)

    def boot(self, host: str) -> None:
        """Start a host that lost its power. It answers messages of its old connections with a reset."""
        self.rebooted.update(self._vanished.pop(host, ()))

    def remember(self, end: End) -> None:
        """Keep an end at which messages wait for the end of a cut."""
        self._ends[end] = None

    def forget(self, end: End) -> None:
        if not end.waits:
            self._ends.pop(end, None)
        self._ends_of.get(end.process, {}).pop(end, None)

    def _pair(self, client: Process, server: Process) -> tuple[End, End]:
        def nothing(*_: Any) -> None:
            pass

        ends = End(self, client, nothing, nothing), End(self, server, nothing, nothing)
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        for end in ends:
            self._ends[end] = None
            self._ends_of.setdefault(end.process, {})[end] = None
        return ends


class Keepalive:
    """Close connections whose other end has not answered probes for a while, and call `ended`."""

    def __init__(self, process: Process, ended: Callable[[End], None]) -> None:
        self._process = process
        self._ended = ended
        self._patience: dict[End, float] = {}
        self._is_watching = False

    def watch(self, end: End) -> None:
        self._patience[end] = self._process.world.random.uniform(*KEEPALIVE_TIMEOUT_S)
        if not self._is_watching:
            self._is_watching = True
            self._process.after(KEEPALIVE_EVERY_S, self._probe)

    def forget(self, end: End) -> None:
        self._patience.pop(end, None)

    def restart(self) -> None:
        """Forget silences that began before a pause of this process."""
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
            self._process.after(KEEPALIVE_EVERY_S, self._probe)
