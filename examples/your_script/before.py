"""Train a digit classifier on any number of devices."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 digits of 8 x 8 pixels to train on, and 360 to test with."""
    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(targets)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def network() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))


def train_step(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return accuracy


def checksum(model: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt")
    args = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)

    train_set, test_set = digits()
    test_images, test_labels = (each.to(device) for each in test_set.tensors)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=1)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))

    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    ddp = DistributedDataParallel(model)
    first_epoch = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        first_epoch = saved["epoch"]
        for name, each in states.items():
            each.load_state_dict(saved[name])

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            train_step(ddp, optimizer, scheduler, images.to(device), labels.to(device))
        if rank == 0:
            accuracy = evaluate(model, test_images, test_labels)
            print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}, weights {checksum(model):.9f}", flush=True)
            saved = {name: each.state_dict() for name, each in states.items()}
            torch.save(saved | {"epoch": epoch + 1}, args.checkpoint)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
