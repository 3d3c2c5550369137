"""A gloo group that can be made anew and given up while a peer is dead or stopped: one rank's failure is all ranks'
failure, within milliseconds (gloo_connections.py says how)."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import AllToAllOptions

from agent_client.collectives import gloo_connections, gloo_wait
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
        self.store = store
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._for_torch: list[GlooGroup] = []
        before = gloo_connections.open_sockets()
        self.backend: Any = ProcessGroupGloo(store, rank, size, _options(host, connect_timeout_s))
        self.backend._set_default_timeout(timedelta(seconds=timeout_s))
        self._connections = gloo_connections.of_gloo(before, store, size)
        enlist(self)

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """The sum over all ranks, in place. Raises RuntimeError when a peer is lost; the group is of no use then.

        `timeout_s`: for this one, instead of the group's.
        """
        options: Any = AllreduceOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        gloo_wait.wait(self.backend.allreduce([tensor], options), self.backend, self._is_over)

    def all_gather(self, row: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """The rows of all ranks, each of the same shape and dtype. Raises RuntimeError as all_reduce does.

        For small rows: each is sent to every rank at once, where gloo's all_gather takes `size` - 1 turns.
        """
        options: Any = AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        sent = row.expand(self.size, *row.shape).contiguous()
        rows = torch.empty_like(sent)
        gloo_wait.wait(self.backend.alltoall_base(rows, sent, [], [], options), self.backend, self._is_over)
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
