"""A gloo group that can be made anew and given up while a peer is dead or stopped.

gloo's own abort() leaves wait() hanging until the peer's socket closes. What ends it is to shut down the group's
connected sockets: this side's wait() raises within milliseconds, and so does every peer's, so that one rank's failure
is all ranks' failure (where gloo forgets a wait, gloo_wait.py ends it). They are recognised among those that appear
while the group connects, when other threads may connect, too: one end of gloo's is where a rank listens, and gloo
publishes that in the store. They are held as duplicates, because gloo closes its own and the numbers are used again.
Its listening socket is never touched: the process would abort.
"""

import contextlib
import os
import select
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from agent_client.collectives import gloo_wait
from agent_client.collectives.open_groups import enlist
from lighthouse_protocol.identity import parse_address


class GlooGroup:
    """`rank` of `size`. `host` is the address of this host that peers can reach; `timeout_s` bounds a collective."""

    def __init__(
        self, store: Store, rank: int, size: int, host: str, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Meets all peers of the same `store`. Raises RuntimeError if one does not come within `connect_timeout_s`."""
        self.rank = rank
        self.size = size
        self._store = store
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._is_aborted = False
        self._for_torch: list[GlooGroup] = []
        before = _sockets()
        self.backend: Any = ProcessGroupGloo(store, rank, size, _options(host, connect_timeout_s))
        self.backend._set_default_timeout(timedelta(seconds=timeout_s))
        appeared = [descriptor for link, descriptor in _sockets().items() if link not in before]
        self._connections = _connections(appeared, _published(store, size))
        enlist(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place. Raises RuntimeError when a peer is lost; the group is of no use then.

        `timeout_s`: for this one, instead of the group's.
        """
        options: Any = AllreduceOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        gloo_wait.wait(self.backend.allreduce([tensor], options), self.backend, self._is_over)

    def for_torch(self, name: str) -> ProcessGroup:
        """A second group of the same ranks, for torch's own modules: they run collectives from threads of theirs, and
        one group's must be the same in all ranks. Lives as long as this one."""
        store = PrefixStore(name, self._store)
        ranks = GlooGroup(
            store,
            self.rank,
            self.size,
            self._host,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
        )
        self._for_torch.append(ranks)
        kind = ProcessGroup.BackendType.GLOO
        group: Any = ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, ranks.backend)
        group._set_group_name(name)
        return group

    def abort(self) -> None:
        """End every collective under way, here and at the peers. From any thread; more than once does no harm."""
        for group in self._for_torch:
            group.abort()
        connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._is_aborted = True

    def _is_over(self) -> bool:
        """Whether the group was aborted, here or by a peer: gloo may wait for the timeout where a peer has ended."""
        if not self._is_aborted and _has_ended(self._connections):
            self.abort()
        return self._is_aborted


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Raises RuntimeError, naming the address, if nobody serves a store there."""
    parsed = parse_address(address, "store_address")
    if not parsed.port:
        raise RuntimeError(f"store_address: {address!r} has no port; the group's manager advertised it (--store)")
    try:
        return TCPStore(
            parsed.host, parsed.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as e:
        raise RuntimeError(f"no TCPStore answers at {address}: {e}") from e


def _options(host: str, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return options


def _published(store: Store, size: int) -> bytes:
    """What gloo's ranks put into `store` to be found: each the sockaddr on which it listens, and more."""
    return b"".join(store.multi_get([f"0/{rank}" for rank in range(size)]))


def _sockets() -> dict[str, int]:
    """The descriptor of each socket by its inode's name: a number alone may be another socket's a moment later."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found[link] = int(name)
    return found


def _connections(descriptors: Iterable[int], published: bytes) -> list[socket.socket]:
    """Duplicates of gloo's own."""
    duplicates: list[socket.socket] = []
    for descriptor in descriptors:
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        if _is_gloos(duplicate, published):
            duplicates.append(duplicate)
        else:
            duplicate.close()
    return duplicates


def _has_ended(connections: Sequence[socket.socket]) -> bool:
    """Whether a peer has closed one of them. Another thread may close them here meanwhile."""
    ends = select.poll()
    for connection in connections:
        if (descriptor := connection.fileno()) >= 0:
            ends.register(descriptor, select.POLLRDHUP)
    return bool(ends.poll(0))


def _is_gloos(candidate: socket.socket, published: bytes) -> bool:
    family = candidate.family
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ends = (candidate.getsockname(), candidate.getpeername())
    except OSError:  # it listens, or its peer is gone
        return False
    return any(_in_sockaddr(family, host, port) in published for host, port, *_ in ends)


def _in_sockaddr(family: int, host: str, port: int) -> bytes:
    """What follows the family in a sockaddr: the port, IPv6's flow label, the address."""
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return port.to_bytes(2, "big") + flow + socket.inet_pton(family, host)
