"""What is let go between two generations, and what the collector need not look at for it."""

import functools
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed.tensor
from torch.distributed import HashStore, TCPStore, distributed_c10d

from agent_client.collectives.interruptible import InterruptibleGroup
from agent_client.collectives.nccl import DUMP
from agent_client.restart import store
from agent_client.restart.interrupter import ProcessGroups
from agent_client.restart.store import State
from agent_client.restart.torch_scope import TorchScope
from lighthouse_protocol.identity import parse_address

HANDLING, RETHROW = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"


class Held:
    """As a mesh, in a cache or in a circle of references."""

    def __init__(self) -> None:
        self.circle = self


@functools.cache
def of_mesh(mesh: Held) -> Held:
    return mesh


of_mesh.__module__ = "torch.distributed.tensor.of_a_test"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gc.unfreeze()
    of_mesh.cache_clear()


def recovered(scope: TorchScope) -> None:
    scope.patch(0)
    scope.restore()
    scope.recover()


def test_caches_are_cleared_that_the_script_has_frozen() -> None:
    gc.freeze()
    scope = TorchScope("")
    of_mesh(Held())
    recovered(scope)
    assert of_mesh.cache_info().currsize == 0
    scope.unfreeze()


def test_what_was_there_before_is_not_looked_at() -> None:
    scope = TorchScope("")
    assert gc.get_freeze_count() > 10_000
    scope.unfreeze()
    assert gc.get_freeze_count() == 0


def test_what_the_function_has_frozen_is_let_go() -> None:
    scope = TorchScope("")
    made = [Held() for _ in range(1000)]
    gc.freeze()
    left = weakref.ref(made.pop())
    made.clear()
    recovered(scope)
    assert left() is None
    scope.unfreeze()


def test_nccl_s_watchdog_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lighthouse tells of a peer's end; and unless the script says something else."""
    monkeypatch.delenv(HANDLING, raising=False)
    monkeypatch.setenv(RETHROW, "1")
    alone, scope = TorchScope(""), TorchScope("127.0.0.1:1")
    alone.patch(0)
    assert HANDLING not in os.environ
    alone.restore()
    scope.patch(0)
    assert (os.environ[HANDLING], os.environ[RETHROW], os.environ[DUMP]) == ("0", "1", "0")
    scope.restore()
    assert HANDLING not in os.environ
    assert os.environ[RETHROW] == "1"
    scope.unfreeze()
    alone.unfreeze()


def test_torch_s_groups_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators of NCCL that are aborted one by one may wait for each other."""
    torchs, before = distributed_c10d._abort_process_group, list[bool]()

    def abort(*args: Any) -> None:
        before.extend(group._is_aborted for group in distributed_c10d._world.pg_map)
        torchs(*args)

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    groups = ProcessGroups("")
    with groups.patched(0):
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        made = torch.distributed.new_group([0])
        assert isinstance(made, InterruptibleGroup)
        groups.abort()
    assert before == [False, False]
    assert made._is_aborted
    assert not torch.distributed.is_initialized()
    del made
    groups.recover()
    groups.close()


def test_an_init_process_group_that_has_failed_leaves_no_count_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts it into the prefix under which ranks meet in the store: it must not differ from a new process's."""

    def break_off(*args: Any, **options: Any) -> Iterator[Any]:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(distributed_c10d, "rendezvous", break_off)
        groups = ProcessGroups("")
        with groups.patched(0), pytest.raises(RuntimeError, match="interrupted"):
            torch.distributed.init_process_group("gloo", rank=0, world_size=2)
        groups.recover()
        assert distributed_c10d._world.group_count > 0, "torch's count still needs us"
        with groups.patched(1):
            assert distributed_c10d._world.group_count == 0
            torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            groups.abort()
    groups.recover()
    groups.close()


class Keys:
    """A run of this process alone, whose lighthouse takes keys."""

    def __init__(self) -> None:
        self.client: Any = self
        self.state = State(use_global_iteration=True)
        self.run_id, self.slot, self.secret, self.timeout_s = "r", 0, "", 5.0
        self.put: list[tuple[int, bytes]] = []

    def put_key(self, generation: int, kind: str, name: str, value: bytes, **_: object) -> None:
        self.put.append((generation, value))

    def advance(self) -> int:
        self.state.iteration += 1
        return self.state.iteration


def test_after_an_advance_ranks_meet_at_a_store_of_the_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have been replaced by a spare, which knows no store and no count of the generation before."""
    run = Keys()
    monkeypatch.setattr(store, "present_runs", [run])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    groups = ProcessGroups("127.0.0.1:1")
    with groups.patched(0):
        for generation in range(2):
            for count in (1, 2):
                met, _, _ = next(distributed_c10d.rendezvous("env://"))
                met.set("met", b"")
                where = parse_address(run.put[-1][1].decode(), "key")
                peer = TCPStore(where.host, where.port or 0, is_master=False)
                assert peer.check([f"{generation}.{count}/met"])
            run.advance()
    groups.recover()
    groups.close()
    assert [generation for generation, _ in run.put] == [0, 1]
