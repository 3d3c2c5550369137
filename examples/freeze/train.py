"""Train eight ranks on one host, with a validation after each epoch. After the first epoch they freeze as in `--mode`.

loader      the validation loader of ranks 1 to 7 yields no batch, and rank 0 waits for their metrics
divergence  rank 0 validates an averaged copy (EMA); the others validate the DDP module, which first broadcasts buffers
slow        one batch of rank 3 takes minutes
network     all ranks are in the same collective, and no data arrives
ok          rank 0 validates alone and sends the result to the others, so nothing freezes

The first two look the same in the logs of the ranks. See README.md in this folder.
"""

import argparse
import copy
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from agent_client import (
    Agent,
    CheckpointFolder,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    StepSampler,
    TrainState,
)
from agent_client.collectives.gloo import GlooGroup

log = logging.getLogger("train")

MODES = ("ok", "loader", "divergence", "slow", "network")
RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("LIGHTHOUSE_ATTEMPT", "0"))
SLOW_RANK = 3
FEATURES, CLASSES, IMAGES = 16, 4, 4096

Batch = tuple[torch.Tensor, torch.Tensor]


def images(count: int, seed: int) -> Batch:
    """Draw inputs with labels that a small network can learn."""
    drawn = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    return drawn, (drawn @ teacher).argmax(1)


class ValidationLoader:
    """Loader of the validation data. If it `is_broken`, it blocks before the first batch."""

    def __init__(self, batches: int, *, is_broken: bool) -> None:
        self._batches = batches
        self._is_broken = is_broken
        self._images, self._labels = images(32 * batches, seed=1)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        if self._is_broken:
            threading.Event().wait()
        return zip(self._images.split(32), self._labels.split(32), strict=True)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(RANK)
        self.model = nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.agent = Agent.from_env(state=TrainState(self.model, sgd))
        self.ddp = DistributedDataParallel(self.model, self.agent)
        self.optimizer = FaultTolerantOptimizer(sgd, self.agent)
        self.ema = copy.deepcopy(self.model) if args.mode == "divergence" and RANK == 0 else None
        is_broken = args.mode == "loader" and RANK > 0 and not (args.once and ATTEMPT > 0)
        self.val_loader = ValidationLoader(args.val_batches, is_broken=is_broken)

    # -- training

    def train(self) -> None:
        args, agent = self.args, self.agent
        checkpoints = CheckpointFolder(args.checkpoint_dir, agent)
        if checkpoints.resume():
            log.info("Resumed after epoch %d", agent.current_step // args.steps)
        agent.check_equal("batches per epoch", args.steps)
        inputs, labels = images(IMAGES, seed=0)
        for batch in StepSampler(IMAGES, args.batch_size, agent, seed=0):
            if agent.current_step >= args.epochs * args.steps:
                break
            epoch, number = divmod(agent.current_step, args.steps)
            if number == 0:
                log.info("Epoch %d/%d", epoch + 1, args.epochs)
            self._load(epoch, number)
            if self._step(inputs[batch], labels[batch]) and agent.current_step % args.steps == 0:
                self._end_epoch(epoch + 1, checkpoints)
        log.info("Training completed after %d epochs", args.epochs)
        agent.close()

    def _load(self, epoch: int, number: int) -> None:
        """Simulate the loading of a batch, with the delays of the mode and the options."""
        args = self.args
        with self.agent.phase("loader"):
            if args.mode == "slow" and (epoch, number, RANK) == (1, 5, SLOW_RANK):
                log.info("This batch takes its time")
                time.sleep(args.hang)
            if epoch == number == 0:
                time.sleep(args.first_step)
        if args.mode == "network" and (epoch, number) == (1, 5):
            unplug(args.hang)

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> bool:
        self.ddp.train()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(inputs), labels).backward()
        is_committed = self.optimizer.step()
        if is_committed and self.ema is not None:
            with torch.no_grad():
                for average, parameter in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
        return is_committed

    def _end_epoch(self, epoch: int, checkpoints: CheckpointFolder) -> None:
        log.info("Starting validation for epoch %d", epoch)
        accuracy = self._validate_on_rank0(epoch) if self.args.mode == "ok" else self._validate_everywhere()
        log.info("Validation completed. Epoch %d Acc: %.2f%%", epoch, accuracy)
        if epoch % self.args.checkpoint_interval == 0:
            with self.agent.phase("checkpoint"):
                checkpoints.save()
                time.sleep(self.args.checkpoint_takes)
            log.info("Saved the checkpoint of epoch %d", epoch)

    # -- validation

    def _validate_on_rank0(self, epoch: int) -> float:
        """Validate on rank 0 only, which cannot freeze. With the DDP module, rank 0 would wait for the other ranks."""

        def validate() -> float:
            takes_s = self.args.validation_takes if epoch == 2 else 0.0
            correct, total = self._loop(self.model, takes_s / len(self.val_loader))
            return 100.0 * correct / total

        return self.agent.evaluate_on_rank0(validate)

    def _validate_everywhere(self) -> float:
        """Validate on each rank, and sum the metrics."""
        shared = self.ddp if self.args.mode == "divergence" else self.model
        with self.agent.phase("validation", total=len(self.val_loader)):
            metrics = torch.tensor(self._loop(self.ema or shared))
        correct, total = self.agent.sum_over_group(metrics).tolist()
        log.info("all_reduce completed")
        return 100.0 * correct / total

    def _loop(self, model: nn.Module, pause_s: float = 0.0) -> tuple[int, int]:
        log.info("Starting validation loop, %d batches", len(self.val_loader))
        correct = total = 0
        model.eval()
        with torch.no_grad():
            for inputs, labels in self.val_loader:
                correct += int((model(inputs).argmax(1) == labels).sum())
                total += len(labels)
                time.sleep(pause_s)
                self.agent.tick()
        model.train()
        log.info("Validation loop completed")
        return correct, total


def unplug(for_s: float) -> None:
    """Make each later collective block for `for_s` seconds, as if no data arrived."""

    def all_reduce(self: GlooGroup, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        time.sleep(for_s)

    GlooGroup.all_reduce = all_reduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="ok")
    parser.add_argument("--once", action="store_true", help="the loader freezes only before the first restart")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="batches per epoch")
    parser.add_argument("--val-batches", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--checkpoint-interval", type=int, default=5, metavar="EPOCHS")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True, help="a file per rank")
    parser.add_argument("--hang", type=float, default=600.0, help="duration of slow and network in seconds")
    parser.add_argument("--first-step", type=float, default=0.0, help="additional seconds")
    parser.add_argument("--validation-takes", type=float, default=0.0, help="additional seconds, in epoch 2")
    parser.add_argument("--checkpoint-takes", type=float, default=0.0, help="additional seconds")
    args = parser.parse_args()
    args.log_dir.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s [Rank {RANK}] %(message)s",
        filename=args.log_dir / f"train-rank-{RANK}.log",
    )
    torch.set_num_threads(1)
    Trainer(args).train()


if __name__ == "__main__":
    main()
