"""Train a small network on handwritten digits by DiLoCo: replica groups that talk to each other once in 20 steps.

    lighthouse serve
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=a python train_diloco.py
    LIGHTHOUSE_ADDRESS=localhost:29510 REPLICA_GROUP_ID=b python train_diloco.py

Kill one of them; the other goes on. Start it again; it heals at the next outer step and trains along.
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

from agent_client import Agent, DiLoCo, GroupDrained, StepSampler, TrainState

TEST_EVERY = 5


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8: (training images, labels, test images, labels); every fifth is a test image."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    labels = torch.tensor(targets)
    is_test = torch.arange(len(labels)) % TEST_EVERY == 0
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def weights_hash(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="train until this many outer steps are committed")
    parser.add_argument(
        "--sync-every", type=int, default=20, help="synchronise each parameter after so many inner steps"
    )
    parser.add_argument("--fragments", type=int, default=2, help="synchronise the model in so many parts, in turn")
    parser.add_argument("--delay", type=int, default=1, help="inner steps beside which a fragment travels")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and inner step")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    parser.add_argument("--pace", type=float, default=0.0, help="an inner step takes at least so many seconds")
    parser.add_argument("--events", type=Path, help="append a JSON line per outer step to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    agent = Agent.from_env(state=TrainState(model, inner))
    optimizer = DiLoCo(
        model, inner, outer, agent, sync_every=args.sync_every, fragments=args.fragments, delay=args.delay
    )

    def log_event(**fields: object) -> None:
        if args.events:
            with args.events.open("a") as file:
                file.write(json.dumps({"time": time.time()} | fields) + "\n")

    for batch in StepSampler(len(labels), args.batch_size, optimizer, args.seed):
        if agent.current_step >= args.steps:
            break
        began_at, outer_step = time.monotonic(), agent.current_step
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        if not optimizer.step():
            log_event(discarded=agent.current_step)
        elif agent.current_step > outer_step:
            log_event(
                step=agent.current_step,
                inner_step=optimizer.current_step,
                quorum_id=agent.quorum_id,
                participants=agent.num_participants,
                hash=weights_hash(optimizer.global_parameters),
                loss=loss.item(),
            )
        time.sleep(max(0.0, began_at + args.pace - time.monotonic()))

    for parameter, tensor in zip(model.parameters(), optimizer.global_parameters, strict=True):
        parameter.data.copy_(tensor)
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    weights = weights_hash(optimizer.global_parameters)
    log_event(finished=agent.current_step, accuracy=accuracy, hash=weights)
    print(f"outer step {agent.current_step}: test accuracy {accuracy:.1%}, weights {weights[:16]}", flush=True)
    agent.close()


if __name__ == "__main__":
    try:
        main()
    except GroupDrained as e:
        print(f"ends in good order: {e}", flush=True)
