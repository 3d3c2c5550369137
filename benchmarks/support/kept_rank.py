"""A rank that trains a network, and records each committed step with a digest of its whole state.

    python -m benchmarks.support.kept_rank FOLDER [--steps N] [--width N] [--pace SECONDS]

Each event is one line in FOLDER/REPLICA_GROUP-RANK: the time (CLOCK_MONOTONIC, the same in all processes), what
happened, the step, and a digest, or the number of this start or of its process.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

BEGAN_AT = time.monotonic()

import torch  # noqa: E402  the import is timed
from torch import nn  # noqa: E402

from agent_client import (  # noqa: E402
    Agent,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    GroupDrained,
    StepSampler,
    TrainState,
)

importlib.import_module("torch._dynamo")  # otherwise the first optimizer imports it

SAMPLES, FEATURES = 512, 16


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))):
            found.update(tensor.numpy().data)
    return found.hexdigest()[:16]


def hold(path: Path | None, step: int) -> None:
    while path is not None and path.exists() and int(path.read_text() or 0) <= step:
        time.sleep(0.01)


waited_s: list[float] = []


def timed(call: Callable[..., None]) -> Callable[..., None]:
    """Add the time of each call to `waited_s`."""

    def run(*given: object) -> None:
        began_at = time.monotonic()
        call(*given)
        waited_s.append(time.monotonic() - began_at)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hold", type=Path, help="File with a step that is not passed while the file exists.")
    parser.add_argument("--no-digest", action="store_true")
    parser.add_argument("--alternate", type=int, default=0, help="Keep only in every second block of so many steps.")
    options = parser.parse_args()
    name = f"{os.environ['REPLICA_GROUP_ID']}-{os.environ.get('RANK', '0')}"
    is_first = name.startswith("a-")
    events = os.open(options.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(what: str, step: int, more: object) -> None:
        os.write(events, (json.dumps([time.monotonic(), what, step, more]) + "\n").encode())

    attempt = int(os.environ.get("LIGHTHOUSE_ATTEMPT", "0"))
    os.write(events, (json.dumps([BEGAN_AT, "starts", 0, attempt]) + "\n").encode())
    record("imported", 0, attempt)
    record("pid", 0, os.getpid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7))
    width = options.width
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.999)
    with Agent.from_env(state=TrainState(model, adam, scheduler=scheduler)) as agent:
        replicated, optimizer = DistributedDataParallel(model, agent), FaultTolerantOptimizer(adam, agent)
        keeper = agent.internals.keeper
        if options.alternate and keeper is not None:
            keeper.keep, keeper.finish = timed(keeper.keep), timed(keeper.finish)
        for batch in StepSampler(SAMPLES, options.batch, agent, steps=options.steps):
            began_at = time.monotonic()
            optimizer.zero_grad()
            replicated(inputs[batch]).square().mean().backward()
            if is_first:  # this group waits within the step, the others before it
                hold(options.hold, agent.current_step)
            if optimizer.step():
                scheduler.step()
                record("commit", agent.current_step, "" if options.no_digest else digest_of(model, adam))
                if options.alternate:
                    record("kept", agent.current_step, sum(waited_s))
                    waited_s.clear()
                    agent.internals.keeper = None if agent.current_step // options.alternate % 2 else keeper
            else:
                record("discard", agent.current_step, "")
            if not is_first:
                hold(options.hold, agent.current_step)
            time.sleep(max(0.0, began_at + options.pace - time.monotonic()))


if __name__ == "__main__":
    with contextlib.suppress(GroupDrained):
        main()
