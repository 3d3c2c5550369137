"""Common parts of the training examples that do not concern fault tolerance: the data, options, and a log of steps."""

import argparse
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

from agent_client import Agent

TEST_EVERY = 5


class Digits(NamedTuple):
    """1,797 handwritten digits of 8 x 8 pixels. Every fifth is a test image."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits() -> Digits:
    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets)
    is_test = torch.arange(len(labels)) % TEST_EVERY == 0
    return Digits(images[~is_test], labels[~is_test], images[is_test], labels[is_test])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def bits_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def network() -> nn.Module:
    """Return a small network whose forward passes change its buffers."""
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all tensors that training changes: buffers, parameters, and the optimizer's state for each parameter."""
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        yield from (each for each in optimizer.state.get(parameter, {}).values() if torch.is_tensor(each))


def log_like_the_daemons() -> None:
    """Show the Agent's log lines, with times in UTC."""
    form = "%(asctime)sZ %(levelname).1s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%Y-%m-%dT%H:%M:%S")
    for handler in logging.getLogger().handlers:
        if handler.formatter is not None:
            handler.formatter.converter = time.gmtime


def make_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="train until this many steps are committed")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0, help="seed for the order of the data")
    parser.add_argument("--pace", type=float, default=0.0, help="minimum duration of a step in seconds")
    parser.add_argument(
        "--events",
        type=lambda text: Path(os.path.expandvars(text)),
        help="append a JSON line per committed step to this file; $RANK in its name stands for the rank",
    )
    return parser


class Events:
    """Log in JSON lines for a program that observes the training. Without a file, nothing is logged."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def log(self, **fields: object) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"time": time.time(), "pid": os.getpid()} | fields) + "\n")

    def follow(self, agent: Agent, tensors: Callable[[], Iterable[torch.Tensor]], pace_s: float = 0.0) -> None:
        """Log each commit of another library's training loop, and pause the loop for `pace_s` seconds at each."""

        def committed(step: int) -> None:
            time.sleep(pace_s)
            participants = agent.num_participants
            self.log(step=step, quorum_id=agent.quorum_id, participants=participants, hash=bits_of(tensors()))

        agent.on_commit(committed)

    def committed(self, agent: Agent, loss: torch.Tensor, bits: str, **fields: object) -> None:
        """Log the step that was just committed. `bits` is the hash of the weights after this step."""
        self.log(
            step=agent.current_step,
            quorum_id=agent.quorum_id,
            participants=agent.num_participants,
            hash=bits,
            loss=loss.item(),
            contributed=agent.is_participating,
            **fields,
        )
