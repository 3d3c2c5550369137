"""The peers of a server, and what each may hold: the edge of lighthouse_protocol/rules/peer_limits.py.

Every refusal is logged, but for those that a flood repeats.
"""

import asyncio
import functools
import ipaddress
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from lighthouse_protocol.refusals import LimitReached
from lighthouse_protocol.rules.peer_limits import Peer, PeerLimits, PeerTable, Resource, StreamMeter
from lighthouse_runtime.net.write_gate import MAX_BYTES_TO_ALL, WriteGate
from lighthouse_runtime.timing.sparse_log import SparseLog

log = logging.getLogger(__name__)

IPV6_PREFIX = 64  # one host or site has all addresses of such a network


@dataclass(slots=True)
class _Gate:
    semaphore: asyncio.Semaphore
    users: int = 0


class Peers:
    """To be used on the loop only."""

    def __init__(self, limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self._table = PeerTable(self.limits)
        self._writes_to_all = WriteGate(MAX_BYTES_TO_ALL)
        self._writes: WeakKeyDictionary[Peer, WriteGate] = WeakKeyDictionary()
        self._gates: dict[str, _Gate] = {}
        self._refusals = SparseLog(log, "caller_refused")

    def enter(self, address: str) -> Peer:
        """One more call or stream from there is open, until the peer is left. Raises LimitReached."""
        peer = self._table.get(peer_name(address), _now())
        peer.enter()
        return peer

    def note(self, refusal: LimitReached) -> None:
        """For the log."""
        self._refusals.warning("refused: %s", refusal)

    def stream(self, peer: Peer) -> tuple[StreamMeter, WriteGate]:
        """What one more stream of that peer may send, and how it is sent what is large."""
        gate = self._writes.get(peer)
        if gate is None:
            gate = self._writes[peer] = WriteGate(beyond=self._writes_to_all)
        return StreamMeter(peer, self.limits), gate

    def take(self, address: str, resource: Resource, amount: float = 1.0) -> None:
        """Raises LimitReached."""
        now = _now()
        self._table.get(peer_name(address), now).take(resource, now, amount)

    def may_take(self, address: str, resource: Resource, amount: float = 1.0) -> bool:
        """Takes it if there is so much left; for what can be left out."""
        now = _now()
        return self._table.get(peer_name(address), now).may_take(resource, now, amount)

    @asynccontextmanager
    async def read(self, address: str) -> AsyncGenerator[None]:
        """An answer that costs much. Those of one peer are made a few at a time."""
        name = peer_name(address)
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = _Gate(asyncio.Semaphore(self.limits.reads))
        gate.users += 1
        try:
            async with gate.semaphore:
                yield
        finally:
            gate.users -= 1
            if gate.users == 0:
                del self._gates[name]


@functools.lru_cache(maxsize=4096)
def _host_name(host: str) -> str:
    try:
        address = ipaddress.ip_address(unquote(host).strip("[]"))
    except ValueError:
        return host or "a local process"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
    return str(address)


def peer_name(address: str) -> str:
    """Whom to count a connection for, by its address as gRPC writes it: ipv4:10.0.0.1:4711."""
    kind, _, rest = address.partition(":")
    return _host_name(rest.rpartition(":")[0]) if kind.startswith("ip") else "a local process"


def _now() -> float:
    return asyncio.get_running_loop().time()
