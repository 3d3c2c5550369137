"""Train a small network on handwritten digits, under any number of replica groups.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a torchrun --nproc-per-node 2 --master-port 29601 train_ddp.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b torchrun --nproc-per-node 2 --master-port 29602 train_ddp.py

Kill one of them; the other goes on. Start it again; it heals and trains along.
"""

import argparse
import hashlib
import json
import logging
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from agent_client import (
    Agent,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    GroupDrained,
    StepSampler,
    TrainState,
)

TEST_EVERY = 5


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8: (training images, labels, test images, labels); every fifth is a test image."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    labels = torch.tensor(targets)
    is_test = torch.arange(len(labels)) % TEST_EVERY == 0
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def weights_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the bytes of all parameters and of the optimizer's momentum."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            digest.update(momentum.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="train until this many steps are committed")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    parser.add_argument("--pace", type=float, default=0.0, help="a step takes at least so many seconds")
    parser.add_argument("--events", type=Path, help="append a JSON line per committed step to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    agent = Agent.from_env(state=TrainState(model, sgd))
    replicated = DistributedDataParallel(model, agent)
    optimizer = FaultTolerantOptimizer(sgd, agent)

    def log_event(**fields: object) -> None:
        if args.events:
            with args.events.open("a") as file:
                file.write(json.dumps({"time": time.time()} | fields) + "\n")

    for batch in StepSampler(len(labels), args.batch_size, agent, args.seed):
        if agent.current_step >= args.steps:
            break
        began_at = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replicated(images[batch]), labels[batch])
        loss.backward()
        if optimizer.step():
            log_event(
                step=agent.current_step,
                quorum_id=agent.quorum_id,
                participants=agent.num_participants,
                hash=weights_hash(model, sgd),
                loss=loss.item(),
                contributed=agent.is_participating,
            )
        else:
            log_event(discarded=agent.current_step)
        time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    log_event(finished=agent.current_step, accuracy=accuracy, hash=weights_hash(model, sgd))
    print(
        f"step {agent.current_step}: test accuracy {accuracy:.1%}, weights {weights_hash(model, sgd)[:16]}", flush=True
    )
    agent.close()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
