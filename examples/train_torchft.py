"""Train a small network on handwritten digits with a plain torchft script, in any number of replica groups.

The line after the imports is new. With it, torchft's Python runs on this project's managers.

    lighthouse serve
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 NUM_REPLICA_GROUPS=2
    REPLICA_GROUP_ID=0 torchrun --master-port 29601 train_torchft.py
    REPLICA_GROUP_ID=1 torchrun --master-port 29602 train_torchft.py

Kill one group, and the other continues. Start it again, and it heals and takes part again.
"""

import argparse
import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from agent_client.torchft import install
from progress_bar import ProgressBar

install()


def weights_hash(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="train until this many steps are committed")
    parser.add_argument("--min-groups", type=int, default=1, help="minimum number of replica groups for a commit")
    args = parser.parse_args()
    group, groups = int(os.environ.get("REPLICA_GROUP_ID", 0)), int(os.environ.get("NUM_REPLICA_GROUPS", 2))

    pixels, targets = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets))
    sampler = DistributedSampler(digits, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1)
    loader = DataLoader(digits, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=args.min_groups,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"train_torchft_{group}",
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(minutes=5),
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, sgd)

    with ProgressBar(args.steps, lines_every_s=0) as progress:
        while manager.current_step() < args.steps:
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(replicated(images), labels)
                loss.backward()
                optimizer.step()
                step = manager.current_step()
                progress.show(step, manager.num_participants(), loss)
                if step >= args.steps:
                    break

    print(f"ends at step {manager.current_step()} with weights {weights_hash(model)}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
