"""Train a small transformer on handwritten digits: sharded inside each replica group, replicated across the groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --nproc-per-node 2 --master-port 29601 train_hsdp.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --nproc-per-node 2 --master-port 29602 train_hsdp.py

Kill one of them; the other goes on. Start it again; it heals, each rank its own shards, and trains along.
"""

import argparse
import hashlib
import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agent_client import Agent, FaultTolerantOptimizer, GroupDrained, StepSampler, TrainState, replicate

TEST_EVERY = 5


class Reader(nn.Module):
    """Reads an image as a sequence of eight rows."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Embedding(8, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of shape (batch, 10) for `images` of shape (batch, 8, 8)."""
        hidden = self.embed(images) + self.places(torch.arange(8))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def sharded_reader() -> Reader:
    """Layer by layer over the ranks of this replica group, which is torch's world."""
    model = Reader()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def weights_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over all parameters and the optimizer's state, gathered from the ranks of the group."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state.get(parameter, {}).values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(whole.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="train until this many steps are committed")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--pace", type=float, default=0.0, help="a step takes at least so many seconds")
    parser.add_argument("--events", type=Path, help="append a JSON line per committed step to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    images, labels = (torch.tensor(data) for data in load_digits(return_X_y=True))
    images = (images / 16).float().view(-1, 8, 8)
    is_test = torch.arange(len(labels)) % TEST_EVERY == 0
    training, answers = images[~is_test], labels[~is_test]

    model = sharded_reader()
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    agent = Agent.from_env(state=TrainState(model, adam))
    replicate(model, agent)
    optimizer = FaultTolerantOptimizer(adam, agent)

    def log_event(**fields: object) -> None:
        if args.events:
            with args.events.open("a") as file:
                file.write(json.dumps({"time": time.time()} | fields) + "\n")

    for batch in StepSampler(len(answers), args.batch_size, agent):
        if agent.current_step >= args.steps:
            break
        began_at = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(training[batch]), answers[batch])
        loss.backward()
        if optimizer.step():
            log_event(
                step=agent.current_step,
                quorum_id=agent.quorum_id,
                participants=agent.num_participants,
                hash=weights_hash(model, adam),
                loss=loss.item(),
                contributed=agent.is_participating,
            )
        else:
            log_event(discarded=agent.current_step)
        time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    with torch.no_grad():
        accuracy = float((model(images[is_test]).argmax(1) == labels[is_test]).float().mean())
    weights = weights_hash(model, adam)
    log_event(finished=agent.current_step, accuracy=accuracy, hash=weights)
    print(f"step {agent.current_step}: test accuracy {accuracy:.1%}, weights {weights[:16]}", flush=True)
    agent.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
