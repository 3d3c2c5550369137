"""The sockets by which a gloo group is connected, so that what waits for a peer in C++ can be ended from outside.

gloo's own abort() leaves wait() hanging until the peer's socket closes. What ends it is to shut down the group's
connected sockets: this side's wait() raises within milliseconds, and so does every peer's (where gloo forgets a wait,
gloo_wait.py ends it). They are recognised among those that appear while the group connects, when other threads may
connect, too: one end of gloo's is where a rank listens, and gloo publishes that in the store. They are held as
duplicates, because gloo closes its own and the numbers are used again. Its listening socket is never touched: the
process would abort.
"""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterable

from torch.distributed import Store

Inodes = frozenset[str]


class Connections:
    """Of one group, held from now on. All methods are for any thread, and more than once does no harm."""

    def __init__(self, sockets: Iterable[socket.socket] = ()) -> None:
        self._sockets = list(sockets)
        self._are_over = False

    def __del__(self) -> None:
        for each in self._sockets:
            each.close()

    def shut_down(self) -> None:
        self._are_over = True
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # the peer was faster
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def are_over(self) -> bool:
        """Whether they were shut down, here or, one of them, by its peer; then all are."""
        if not self._are_over and self._has_lost_a_peer():
            self.shut_down()
        return self._are_over

    def _has_lost_a_peer(self) -> bool:
        ends = select.poll()
        for each in self._sockets:
            if (descriptor := each.fileno()) >= 0:
                ends.register(descriptor, select.POLLRDHUP)
        return bool(ends.poll(0))


def open_sockets() -> Inodes:
    """Of this process. A descriptor alone may be another socket's a moment later."""
    return frozenset(_descriptors())


def of_gloo(before: Inodes, store: Store, size: int) -> Connections:
    """Those of the group that has connected since `before` by what its ranks put into `store` to be found: each the
    sockaddr on which it listens, and more."""
    published = b"".join(store.multi_get([f"0/{rank}" for rank in range(size)]))
    return Connections(_appeared(before, lambda *ends: any(_sockaddr(*end) in published for end in ends)))


def of_store(before: Inodes, port: int) -> Connections:
    """Those to a store's server, which listens on `port`, that have appeared since `before`."""
    return Connections(_appeared(before, lambda _own, peer: peer[2] == port))


End = tuple[int, str, int]
"""Family, host and port."""


def _appeared(before: Inodes, is_wanted: Callable[[End, End], bool]) -> list[socket.socket]:
    """Duplicates."""
    found: list[socket.socket] = []
    for inode, descriptor in _descriptors().items():
        if inode in before:
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        ends = _ends(duplicate)
        if ends is not None and is_wanted(*ends):
            found.append(duplicate)
        else:
            duplicate.close()
    return found


def _descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found[link] = int(name)
    return found


def _ends(connection: socket.socket) -> tuple[End, End] | None:
    """This one and the peer's."""
    family = connection.family
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        own, peer = connection.getsockname(), connection.getpeername()
    except OSError:  # it listens, or its peer is gone
        return None
    return (family, *own[:2]), (family, *peer[:2])


def _sockaddr(family: int, host: str, port: int) -> bytes:
    """What follows the family in a sockaddr: the port, IPv6's flow label, the address."""
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return port.to_bytes(2, "big") + flow + socket.inet_pton(family, host)
