"""Ties the process groups that a wrapped function creates with torch.distributed to the function's generation.

While the function runs, torch creates groups that can be aborted (collectives/interruptible.py). Their ranks connect
through a store that belongs to the current generation. So no keys of an earlier generation are visible, and rank 0 may
be another process in each generation. `TorchScope` patches torch.distributed for a generation and then restores it.
"""

import ctypes
import functools
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from agent_client.collectives import gloo as gloo_connections
from agent_client.collectives import nccl as nccl_watchdog
from agent_client.collectives.gloo import Connections
from agent_client.collectives.interruptible import InterruptibleGroup
from agent_client.restart.store import StoreMixin, until_set
from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_runtime.net.address import advertised_host

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default for a store
CONNECT_TIMEOUT = timedelta(seconds=10)  # short, because the store already listens and an abort cannot end this wait
_STORE = "torch_store"
_VARIABLES = {**nccl_watchdog.QUIET, "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Variables that keep NCCL's watchdog from killing the process after a failure, or from blocking it for minutes.
Values that the script has set take precedence."""
_LRU_CACHE = type(functools.lru_cache(print))
_CLEARING = (("debug", "_clear_sharding_prop_cache"), ("_redistribute", "clear_redistribute_planner_cache"))
"""DTensor modules with caches that are not lru_caches, and the functions that clear these caches."""

# torch evaluates group.WORLD in default arguments of this module, so import it before a group exists.
importlib.import_module("torch.distributed.nn.functional")


class TorchScope:
    """Makes torch.distributed create groups that can be aborted and that belong to a single generation.

    `patch` begins a generation, and `restore` undoes the patches. `abort` may be called at any time, `recover` only
    after `restore`.
    """

    def __init__(self, lighthouse: str) -> None:
        """Exclude all existing objects from garbage collection, so that cleanups need not scan them.

        `lighthouse` is the lighthouse's address, or empty if this process restarts without one.
        """
        self._lighthouse = lighthouse
        self._excepthook: Any = None
        self._replaced: dict[str, Any] = {}
        self._variables: list[str] = []
        self._generation = 0
        self._store: Store | None = None
        self._rendezvous_count = 0
        self._connections: list[Connections] = []
        # Scanning all objects would take most of the time of a restart.
        gc.collect()
        gc.unfreeze()  # the script may have frozen its imports, and then _clear_caches would not find them
        self._caches = _caches()
        gc.freeze()
        self._frozen = gc.get_freeze_count()

    def unfreeze(self) -> None:
        gc.unfreeze()

    def patch(self, generation: int) -> None:
        self._begin_generation(generation)
        _forget_unfinished_groups()
        self._excepthook = sys.excepthook
        self._replaced = {name: getattr(distributed_c10d, name) for name in ("ProcessGroup", "rendezvous")}
        distributed_c10d.ProcessGroup = InterruptibleGroup  # pyright: ignore[reportAttributeAccessIssue]
        distributed_c10d.rendezvous = self._rendezvous
        if self._lighthouse:  # without a lighthouse, only NCCL's watchdog can end a collective
            self._variables = [name for name in _VARIABLES if name not in os.environ]
            os.environ.update({name: _VARIABLES[name] for name in self._variables})

    def _begin_generation(self, generation: int) -> None:
        self._generation, self._rendezvous_count, self._store = generation, 0, None

    def restore(self) -> None:
        for name in self._variables:
            os.environ.pop(name, None)
        for name, value in self._replaced.items():
            setattr(distributed_c10d, name, value)

    def abort(self) -> None:
        """Abort all groups of torch.distributed, and all waits for the generation's store.

        NCCL groups are aborted together, between ncclGroupStart and ncclGroupEnd.
        """
        if torch.distributed.is_initialized():
            distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        connections, self._connections = self._connections, []
        for each in connections:
            each.shut_down()

    def recover(self) -> None:
        """Destroy the groups of a failed generation, and free its memory. All groups must already be aborted."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sys.excepthook = self._excepthook  # each init_process_group has wrapped it
        if gc.get_freeze_count() > self._frozen:  # the function froze its own objects, which would never be freed
            gc.unfreeze()
            self._frozen = 0
        _clear_caches(self._caches)
        gc.collect()  # frees DataLoader iterators and groups, which ends their workers and threads
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:  # otherwise the C library keeps the memory while the next generation allocates its model
            trim(0)

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        # The function may have advanced to another generation, in which other processes may take part.
        if self._lighthouse and (generation := StoreMixin().get_global_iteration()) != self._generation:
            self._begin_generation(generation)
        self._rendezvous_count += 1
        prefix = f"{self._generation}.{self._rendezvous_count}"
        if not self._lighthouse or url != "env://":
            for store, *place in self._replaced["rendezvous"](url, rank, world_size, **options):
                yield PrefixStore(prefix, store), *place
        else:
            own = int(os.environ["RANK"]) if rank < 0 else rank
            store = self._own_store(own == 0, self._lighthouse, options.get("timeout", DEFAULT_TIMEOUT))
            yield PrefixStore(prefix, store), own, int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size

    def _own_store(self, is_first: bool, lighthouse: str, timeout: timedelta) -> Store:
        """Return the generation's store.

        Rank 0 (`is_first`) serves the store, and publishes its address at the lighthouse. Other ranks wait for the
        address.
        """
        if self._store is None:
            before = gloo_connections.socket_inodes()
            if is_first:
                host = advertised_host(lighthouse)
                store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
                StoreMixin().set_key(KeyKind.ITERATION, _STORE, str(Address(host, store.port)))
            else:
                limit_s = timeout.total_seconds()
                try:
                    found = until_set(lambda: StoreMixin().get_key(KeyKind.ITERATION, _STORE), limit_s)
                except TimeoutError:
                    raise TimeoutError(
                        f"rank 0 has not called init_process_group within {limit_s:g} s, so there is no store "
                        "to connect to"
                    ) from None
                assert found is not None
                address = parse_address(found, _STORE)
                connect_timeout = min(timeout, CONNECT_TIMEOUT)
                store = TCPStore(address.host, address.port or 0, is_master=False, timeout=connect_timeout)
                store.set_timeout(timeout)
            self._connections.append(gloo_connections.store_connections(before, store.port))
            self._store = store
        return self._store


def _forget_unfinished_groups() -> None:
    # torch counts the groups that it creates, and the ranks in a group use a store prefix with that count. After an
    # interrupted or failed init_process_group, the count would permanently differ from the other ranks' count.
    if torch.distributed.is_initialized():
        return
    world: Any = distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, name).clear()
    distributed_c10d._unregister_all_process_groups()  # pyright: ignore[reportPrivateUsage]
    world.group_count = 0


def _clear_caches(frozen: Sequence[Any]) -> None:
    """Clear DTensor's caches, whose keys refer to device meshes of aborted groups.

    `frozen` contains the caches that gc.get_objects() does not return, because they were excluded by gc.freeze().
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in _CLEARING:  # in older versions of torch, these caches are lru_caches
        clear = getattr(importlib.import_module(f"torch.distributed.tensor.{module}"), name, None)
        if clear is not None:
            clear()
    for each in (*frozen, *_caches()):
        each.cache_clear()


def _caches() -> list[Any]:
    return [
        each
        for each in gc.get_objects()
        if type(each) is _LRU_CACHE and (each.__module__ or "").startswith("torch.distributed.")
    ]
