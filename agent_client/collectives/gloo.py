"""A gloo group that can be made anew and given up while a peer is dead or stopped: one rank's failure is all ranks'
failure, within milliseconds (gloo_connections.py says how).
"""

import contextlib
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import AllToAllOptions

from agent_client.collectives.group_spec import enlist
from lighthouse_protocol.identity import parse_address

# -- gloo connections ---------------------------------------------------------
#
# The sockets by which a gloo group is connected, so that what waits for a peer in C++ can be ended from outside.
#
# gloo's own abort() leaves wait() hanging until the peer's socket closes. What ends it is to shut down the group's
# connected sockets: this side's wait() raises within milliseconds, and so does every peer's (where gloo forgets a
# wait, gloo_wait.py ends it). They are recognised among those that appear while the group connects, when other
# threads may connect, too: one end of gloo's is where a rank listens, and gloo publishes that in the store. They are
# held as duplicates, because gloo closes its own and the numbers are used again. Its listening socket is never
# touched: the process would abort.

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


# -- gloo wait ----------------------------------------------------------------
#
# Waiting for work of gloo that may never end.
#
# When a connection ends, gloo tells those who wait for its peer, but not a send that lies in its queue
# (gloo/transport/tcp/pair.cc, signalException): that work ends by its timeout only. So a wait is given up once its
# group was aborted, here or by a peer, as soon as nothing can write to its tensors any more: no connection is left,
# and gloo's threads are at rest. One of them has been seen to keep running after an abort. It is given SPINS_S, long
# enough to read what was left in the sockets' buffers.

SLICE_S = 0.05
SPINS_S = 5.0
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
_GIVEN_UP = "the process group was aborted, and gloo did not end what was under way in it"
LET_GO_WITHIN_S = 1.0
THREADS = {"pt_gloo_runloop", "gloo_tcp_loop"}


def wait(work: Any, backend: Any, is_aborted: Callable[[], bool], limit_s: float = math.inf) -> None:
    """Until `work` of `backend` has ended. Raises RuntimeError if it has failed, was given up, or after `limit_s`."""
    began_at, aborted_at = time.monotonic(), None
    while not _ends_within(work, SLICE_S):
        now = time.monotonic()
        if not is_aborted():
            if now - began_at > limit_s:
                raise RuntimeError(f"the collective did not end within {limit_s:g} s")
            continue
        aborted_at = now if aborted_at is None else aborted_at
        if (are_at_rest() or now - aborted_at >= SPINS_S) and not _ends_within(work, SLICE_S):
            keep([work], backend)
            raise RuntimeError(_GIVEN_UP)


def keep(works: Sequence[Any], backend: Any) -> None:
    """`backend` for as long as one of its `works` is under way: its destructor waits for them."""
    if not all(work.is_completed() for work in works):
        threading.Thread(target=_outlive, args=(works, backend), name="gloo remains", daemon=True).start()


def keep_briefly(works: Iterable[Any]) -> None:
    """The newest `works` of a group that ends, until gloo's threads have let go of them.

    A thread of gloo that is the last to hold one needs the interpreter's lock to free its tensors. What ends the group
    in C++, such as DDP's reducer, holds that lock and waits for the thread: for good.
    """
    timer = threading.Timer(LET_GO_WITHIN_S, list[Any].clear, [list(works)])
    timer.name, timer.daemon = "gloo remains", True
    timer.start()


def _outlive(works: Sequence[Any], _backend: Any) -> None:
    """Not by work.wait(): a thread that returns from there while the interpreter ends ends the process by SIGABRT."""
    pause_s = FIRST_PAUSE_S  # most end at once
    while not all(work.is_completed() for work in works):
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def wait_in_thread(work: Any, is_aborted: Callable[[], bool], timeout: timedelta) -> None:
    """The same for a message, whose wait cannot be cut in pieces: a thread waits for as long as it takes."""
    outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
    threading.Thread(target=_report, args=(work, timeout, outcome), name="gloo message", daemon=True).start()
    while True:
        was_aborted = is_aborted()
        with contextlib.suppress(queue.Empty):
            error = outcome.get(timeout=SLICE_S)
            break
        if was_aborted:
            raise RuntimeError(_GIVEN_UP)
    if error is not None:
        raise error


def _report(work: Any, timeout: timedelta, outcome: "queue.SimpleQueue[RuntimeError | None]") -> None:
    try:
        work.wait(timeout)
    except RuntimeError as e:
        outcome.put(e)
    else:
        outcome.put(None)


def _ends_within(work: Any, timeout_s: float) -> bool:
    """Raises RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended well in this very moment
    return True


def are_at_rest(tasks: Path = Path("/proc/self/task")) -> bool:
    """Check whether all of gloo's threads in this process are asleep.

    Older versions of torch do not name these threads; there, all threads that Python has not started must be asleep.
    """
    found = {task.name: _look_at(task) for task in tasks.iterdir()}
    if {name for name, _ in found.values()} >= THREADS:
        states = {state for name, state in found.values() if name in THREADS}
    else:
        known = {str(each.native_id) for each in threading.enumerate() if not each.name.startswith("Dummy-")}
        states = {state for thread, (name, state) in found.items() if name and thread not in known}
    return states == {"S"}


def _look_at(task: Path) -> tuple[str, str]:
    """(name, state as in proc(5)) of a thread; it may have ended by now."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return "", ""
    return name, rest.split()[0]


class GlooGroup:
    """`rank` of `size`. `host` is the address of this host that peers can reach; `timeout_s` bounds a collective."""

    def __init__(
        self, store: Store, rank: int, size: int, host: str, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        """Meets all peers of the same `store`. Raises RuntimeError if one does not come within `connect_timeout_s`."""
        self.rank = rank
        self.size = size
        self.store = store
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._for_torch: list[GlooGroup] = []
        before = open_sockets()
        self.backend: Any = ProcessGroupGloo(store, rank, size, _options(host, connect_timeout_s))
        self.backend._set_default_timeout(timedelta(seconds=timeout_s))
        self._connections = of_gloo(before, store, size)
        enlist(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place. Raises RuntimeError when a peer is lost; the group is of no use then.

        `timeout_s`: for this one, instead of the group's.
        """
        options: Any = AllreduceOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        wait(self.backend.allreduce([tensor], options), self.backend, self._is_over)

    def all_gather(self, row: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """The rows of all ranks, each of the same shape and dtype. Raises RuntimeError as all_reduce does.

        For small rows: each is sent to every rank at once, where gloo's all_gather takes `size` - 1 turns.
        """
        options: Any = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        sent = row.expand(self.size, *row.shape).contiguous()
        rows = torch.empty_like(sent)
        wait(self.backend.alltoall_base(rows, sent, [], [], options), self.backend, self._is_over)
        return rows

    def for_torch(self, name: str) -> ProcessGroup:
        """A second group of the same ranks, for torch's own modules: they run collectives from threads of theirs, and
        one group's must be the same in all ranks. Lives as long as this one."""
        store = PrefixStore(name, self.store)
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
        self._connections.shut_down()

    def _is_over(self) -> bool:
        """Whether the group was aborted, here or by a peer: gloo may wait for the timeout where a peer has ended."""
        is_over = self._connections.are_over()
        if is_over:
            self.abort()
        return is_over


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
