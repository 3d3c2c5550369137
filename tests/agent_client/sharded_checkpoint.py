"""Ranks of one group that shard a model (FSDP2), take some steps from the newest checkpoint, and save.

    python -m tests.agent_client.sharded_checkpoint FOLDER STEPS LAYOUT    # with RANK, WORLD_SIZE and MASTER_*

LAYOUT is "sharded", or "plain" for one rank without fully_shard. Prints the step that was resumed and a hash of the
whole model and optimizer, before and after the steps. No lighthouse is needed: a stand-in counts the steps.
"""

import json
import sys
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agent_client.state.train_state import TrainState
from agent_client.training.checkpoint_folder import CheckpointFolder
from tests.agent_client.actors import digest
from tests.agent_client.sharded_training import adam_of, loss_of, model_of


class Rank:
    catches_up = False

    def __init__(self, state: TrainState) -> None:
        self.group_rank, self.group_world_size = distributed.get_rank(), distributed.get_world_size()
        self.state, self.step = state, 0

    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tag_quorum_id": 1, "batches_committed": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def whole(tensor: Any) -> torch.Tensor:
    """Gather by objects: torch's full_tensor() may end a process (README, "What this version cannot do")."""
    if not hasattr(tensor, "to_local"):
        return tensor
    shards: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shards, tensor.to_local())
    return torch.cat(shards)


def main(folder: str, steps: int, layout: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = model_of(distributed.get_rank())
    if layout != "plain":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adam_of(model)
    rank = Rank(TrainState(model, optimizer))
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
    print(json.dumps([*begun, rank.step, told()]), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
