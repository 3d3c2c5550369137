"""Train a small network on handwritten digits, in any number of replica groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --nproc-per-node 2 --master-port 29601 train_ddp.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --nproc-per-node 2 --master-port 29602 train_ddp.py

Kill one group, and the other continues. Start it again, and it heals and takes part again.
"""

import time
from collections.abc import Iterator

import torch
from torch import nn

from agent_client import (
    Agent,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    GroupDrained,
    StepSampler,
    TrainState,
)
from digits import Events, accuracy, bits_of, digits, log_like_the_daemons, make_parser
from progress_bar import ProgressBar


def weights(model: nn.Module, sgd: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield everything that training changes: the parameters and their momentum."""
    for parameter in model.parameters():
        yield parameter
        yield from (state for state in sgd.state.get(parameter, {}).values() if state is not None)


def main() -> None:
    parser = make_parser(__doc__, steps=500)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    log_like_the_daemons()

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    agent = Agent.from_env(state=TrainState(model, sgd))
    replicated = DistributedDataParallel(model, agent)
    optimizer = FaultTolerantOptimizer(sgd, agent)

    events = Events(args.events)
    with ProgressBar(args.steps) as progress:
        for batch in StepSampler(len(labels), args.batch_size, agent, args.seed):
            if agent.current_step >= args.steps:
                break
            began_at = time.monotonic()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replicated(images[batch]), labels[batch])
            loss.backward()
            if optimizer.step():
                events.committed(agent, loss, bits_of(weights(model, sgd)))
                progress.show(agent.current_step, agent.num_participants, loss)
            else:
                events.log(discarded=agent.current_step)
            time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    reached, bits = accuracy(model, test_images, test_labels), bits_of(weights(model, sgd))
    events.log(finished=agent.current_step, accuracy=reached, hash=bits)
    print(f"step {agent.current_step}: test accuracy {reached:.1%}, weights {bits[:16]}", flush=True)
    agent.close()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
