"""Train a small transformer on handwritten digits: sharded inside each replica group, replicated across the groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --nproc-per-node 2 --master-port 29601 train_hsdp.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --nproc-per-node 2 --master-port 29602 train_hsdp.py

Kill one group, and the other continues. Start it again, and each of its ranks heals its own shards.
"""

import time
from collections.abc import Iterator

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agent_client import Agent, FaultTolerantOptimizer, GroupDrained, StepSampler, TrainState, replicate
from digits import Events, accuracy, bits_of, digits, log_like_the_daemons, make_parser
from progress_bar import ProgressBar


class Reader(nn.Module):
    """Transformer that reads an image as a sequence of eight rows."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Embedding(8, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (batch, 10) for images of shape (batch, 64)."""
        hidden = self.embed(images.view(-1, 8, 8)) + self.places(torch.arange(8))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def sharded_reader() -> Reader:
    """Return a model that is sharded layer by layer over the ranks of this group, which are torch's default group."""
    model = Reader()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shards(model: nn.Module, adam: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's shards of parameters and optimizer state. Rank r has equal shards in all groups."""
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *adam.state.get(parameter, {}).values()):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = make_parser(__doc__, steps=300)
    args = parser.parse_args()
    log_like_the_daemons()

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    images, labels, test_images, test_labels = digits()

    model = sharded_reader()
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    agent = Agent.from_env(state=TrainState(model, adam))
    replicate(model, agent)
    optimizer = FaultTolerantOptimizer(adam, agent)

    events = Events(args.events)
    with ProgressBar(args.steps) as progress:
        for batch in StepSampler(len(labels), args.batch_size, agent, args.seed):
            if agent.current_step >= args.steps:
                break
            began_at = time.monotonic()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            if optimizer.step():
                events.committed(agent, loss, bits_of(shards(model, adam)))
                progress.show(agent.current_step, agent.num_participants, loss)
            else:
                events.log(discarded=agent.current_step)
            time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    reached, bits = accuracy(model, test_images, test_labels), bits_of(shards(model, adam))
    events.log(finished=agent.current_step, accuracy=reached, hash=bits)
    print(f"step {agent.current_step}: test accuracy {reached:.1%}, shards {bits[:16]}", flush=True)
    agent.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
