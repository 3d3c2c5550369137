"""What a wrapped function makes with torch.distributed: ended with its generation, and made anew in the next one.

While the function runs, torch makes groups that can be ended (collectives/interruptible.py), and what it connects them
by, the store of `init_process_group`, is the generation's own: none of an earlier one's keys is in it, and it needs no
process to have stayed rank 0.
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

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's, for a store
CONNECT_TIMEOUT = timedelta(seconds=10)  # to a store that is served; nothing ends this wait
_STORE = "torch_store"
_VARIABLES = {**nccl_watchdog.QUIET, "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""NCCL's watchdog ends the process when a peer or a kernel has failed, or keeps it for minutes. Whatever the script
says itself counts."""
_LRU_CACHE = type(functools.lru_cache(print))
_CLEARING = (("debug", "_clear_sharding_prop_cache"), ("_redistribute", "clear_redistribute_planner_cache"))
"""Modules of DTensor, and the functions that clear those of their caches that are not lru_caches."""

importlib.import_module("torch.distributed.nn.functional")  # whose defaults keep the world of their import


class TorchScope:
    """begin, then end; abort at any time, recover between two generations. `lighthouse`: an address of
    that of the run; empty without."""

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self._excepthook: Any = None
        self._replaced: dict[str, Any] = {}
        self._variables: list[str] = []
        self._generation = 0
        self._store: Store | None = None
        self._rendezvous_count = 0
        self._connections: list[Connections] = []
        self._had_frozen = gc.get_freeze_count() > 0
        self._caches = _freeze()
        self._frozen = gc.get_freeze_count()

    def close(self) -> None:
        """No generation follows."""
        if not self._had_frozen:
            gc.unfreeze()

    def begin(self, generation: int) -> None:
        self._generation, self._rendezvous_count, self._store = generation, 0, None
        _forget_unfinished_groups()
        self._excepthook = sys.excepthook
        self._replaced = {name: getattr(distributed_c10d, name) for name in ("ProcessGroup", "rendezvous")}
        distributed_c10d.ProcessGroup = InterruptibleGroup  # pyright: ignore[reportAttributeAccessIssue]
        distributed_c10d.rendezvous = self._rendezvous
        if self._lighthouse:  # without one nothing but the watchdog ends a collective
            self._variables = [name for name in _VARIABLES if name not in os.environ]
            os.environ.update({name: _VARIABLES[name] for name in self._variables})

    def end(self) -> None:
        """torch makes what it always did."""
        for name in self._variables:
            os.environ.pop(name, None)
        for name, value in self._replaced.items():
            setattr(distributed_c10d, name, value)

    def abort(self) -> None:
        """All groups of torch.distributed, NCCL's between ncclGroupStart and ncclGroupEnd, and what waits for the
        store, for example in init_process_group."""
        if torch.distributed.is_initialized():
            distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        connections, self._connections = self._connections, []
        for each in connections:
            each.shut_down()

    def recover(self) -> None:
        """All groups were aborted before."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sys.excepthook = self._excepthook  # torch wraps it once more for each init_process_group
        if gc.get_freeze_count() > self._frozen:  # the function has frozen what it had: it would stay for good
            gc.unfreeze()
            self._frozen = 0
        _clear_caches(self._caches)
        gc.collect()  # a DataLoader's workers end with its iterator, a group's threads with the group
        _give_memory_back()

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        """As torch's, with a store of this generation."""
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
        """Served by the first rank, which tells the others by the generation's keys. Raises a LighthouseError when the
        generation is over, TimeoutError when the first rank does not tell in time."""
        if self._store is None:
            before = gloo_connections.open_sockets()
            if is_first:
                host = advertised_host(lighthouse)
                store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
                StoreMixin().set_key(KeyKind.ITERATION, _STORE, str(Address(host, store.port)))
            else:
                address = _told(timeout.total_seconds())
                connect_timeout = min(timeout, CONNECT_TIMEOUT)
                store = TCPStore(address.host, address.port or 0, is_master=False, timeout=connect_timeout)
                store.set_timeout(timeout)
            self._connections.append(gloo_connections.of_store(before, store.port))
            self._store = store
        return self._store


def _told(limit_s: float) -> Address:
    """Where the first rank of this generation serves its store."""
    try:
        found = until_set(lambda: StoreMixin().get_key(KeyKind.ITERATION, _STORE), limit_s)
    except TimeoutError:
        raise TimeoutError(
            f"rank 0 has not called init_process_group within {limit_s:g} s, so there is no store to meet at"
        ) from None
    assert found is not None
    return parse_address(found, _STORE)


def _forget_unfinished_groups() -> None:
    """torch counts groups before it makes them, and the count is part of the prefix by which ranks meet in the store.
    After an init_process_group that was interrupted or has failed it would differ from the other ranks' for good."""
    if torch.distributed.is_initialized():
        return
    world: Any = distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, name).clear()
    distributed_c10d._unregister_all_process_groups()  # pyright: ignore[reportPrivateUsage]
    world.group_count = 0


def _give_memory_back() -> None:
    """The next generation's model is made beside what the C library keeps of this one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _freeze() -> list[Any]:
    """What is there before the function runs is not its garbage, and to look at it takes most of a restart: the
    collector leaves it out from now on. Returns the caches in it."""
    gc.collect()
    gc.unfreeze()  # a preloaded interpreter has frozen what it has imported
    caches = _caches()
    gc.freeze()
    return caches


def _clear_caches(frozen: Sequence[Any]) -> None:
    """DTensor's: their keys hold meshes, and those their groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in _CLEARING:  # older versions of torch keep these caches in lru_caches, too
        clear = getattr(importlib.import_module(f"torch.distributed.tensor.{module}"), name, None)
        if clear is not None:
            clear()
    for each in (*frozen, *_caches()):
        each.cache_clear()


def _caches() -> list[Any]:
    """Of torch.distributed, but those that are frozen."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is _LRU_CACHE and (each.__module__ or "").startswith("torch.distributed.")
    ]
