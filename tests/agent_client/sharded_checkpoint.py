"""Ranks of one group that shard a model (FSDP2), take some steps from the newest checkpoint, and save.

No lighthouse is needed: a stand-in counts the steps.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agent_client.collectives.gloo import connect_store
from agent_client.state.train_state import TrainState
from agent_client.training.checkpoint_folder import CheckpointFolder
from lighthouse_protocol.messages.membership import Tag
from tests.agent_client.actors import MEETS_WITHIN_S, digest
from tests.agent_client.sharded_training import adam_of, loss_of, model_of


class Internals:
    """What a CheckpointFolder needs of an Agent that has no manager and no supervisor."""

    def __init__(self, group_store: Store | None = None) -> None:
        self.place = SimpleNamespace(group=group_store and SimpleNamespace(store=group_store))
        self.last_saves, self.attached = list[object](), set[object]()
        self.manager = SimpleNamespace(watch=SimpleNamespace(has_fault=lambda kind: False))

    def restore_kept(self, *, above: Tag | None) -> bool:
        return False


class Rank:
    """An Agent as a CheckpointFolder sees it."""

    catches_up = False

    def __init__(self, rank: int, ranks: int, state: Any, internals: Internals) -> None:
        self.group_rank, self.group_world_size, self.state, self.internals = rank, ranks, state, internals
        self.step, self.quorum_id = 0, 1

    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor

    @property
    def current_step(self) -> int:
        return self.step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tag_quorum_id": self.quorum_id, "batches_committed": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.quorum_id = state["step"], state["tag_quorum_id"]


def whole(tensor: Any) -> torch.Tensor:
    """Gather by objects: torch's full_tensor() may end a process (docs/reference/limits.md)."""
    if not hasattr(tensor, "to_local"):
        return tensor
    shards: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shards, tensor.to_local())
    return torch.cat(shards)


class ShardedCheckpointActor:
    """One rank of a group that meets at the store `meeting` under `key`."""

    def run(self, meeting: str, key: str, rank: int, ranks: int, folder: str, steps: int, layout: str) -> list[Any]:
        """Return the step that was resumed and the last one, each with a hash of the whole model and optimizer.

        `layout`: "sharded", or "plain" for one rank without fully_shard.
        """
        torch.set_num_threads(1)
        store = PrefixStore(key, connect_store(meeting, MEETS_WITHIN_S))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        try:
            return train(folder, steps, layout)
        finally:
            distributed.destroy_process_group()


def train(folder: str, steps: int, layout: str) -> list[Any]:
    model = model_of(distributed.get_rank())
    if layout != "plain":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adam_of(model)
    rank = Rank(distributed.get_rank(), distributed.get_world_size(), TrainState(model, optimizer), Internals())
    checkpoints = CheckpointFolder(folder, cast("Any", rank))

    def told() -> str:
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return digest(*(whole(tensor.detach()) for tensor in [*model.parameters(), *moments]))[:12]

    checkpoints.resume()
    begun = rank.step, told()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank.step, 0).backward()
        optimizer.step()
        rank.step += 1
    if steps:
        checkpoints.save()
        checkpoints.wait()
    return [*begun, rank.step, told()]
