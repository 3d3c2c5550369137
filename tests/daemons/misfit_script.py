"""Train two small networks in turn. A file that the test writes says what this start of the script builds and does.

    misfit_script.py SHAPE EVENTS STOP

SHAPE is JSON, read once; `Shape` has its fields. EVENTS takes a JSON line for each thing that happens, with the time of
the monotonic clock, which all processes of a host share. Once STOP is there, the script notes its state at its step,
and ends a few steps later.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from agent_client import Agent, AgentError, DistributedDataParallel, FaultTolerantOptimizer, TrainState

STEP_S = 0.03
STEPS_AFTER = 5  # the first script to end may cut its peers' step short, and they redo it without it
NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Shape:
    """`turn`: which of the two networks is trained in the even steps; `sums`: the dtype of the sum of the losses.

    `discards`: so many that count against this group end it. `is_cut_off`: it asks for its state where nothing listens.
    """

    width: int = 16
    depth: int = 1
    dtype: str = "float32"
    turn: int = 0
    bucket_mb: float = 25.0
    sums: str = "float32"
    discards: int = 1
    is_cut_off: bool = False

    def network(self) -> nn.Module:
        deep = [nn.Linear(self.width, self.width) for _ in range(self.depth)]
        built = nn.Sequential(nn.Linear(8, self.width), *deep, nn.BatchNorm1d(self.width), nn.Linear(self.width, 1))
        return built.to(getattr(torch, self.dtype))


def state_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Parameters, buffers and momentum."""
    yield from model.state_dict().values()
    for optimizer in optimizers:
        for _, kept in sorted(optimizer.state_dict()["state"].items()):
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def digest(tensors: Iterator[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


class Events:
    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, what: str, **more: object) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more})
        with self._path.open("a") as file:
            file.write(line + "\n")


def main(shape: Shape, events: Events, stop: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    model = nn.ModuleDict({"generator": shape.network(), "critic": shape.network()})
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in model.values()
    ]
    state = TrainState(model, optimizers[0], critic=optimizers[1])
    agent = Agent.from_env(state=state, max_consecutive_discards=shape.discards)
    if shape.is_cut_off:
        healing = agent.internals.healing
        find_address = healing._find_address
        healing._find_address = lambda assignment, _: find_address(assignment, NOWHERE)
    parts = [DistributedDataParallel(part, agent, bucket_cap_mb=shape.bucket_mb) for part in model.values()]
    wrapped = [FaultTolerantOptimizer(optimizer, agent) for optimizer in optimizers]
    events.note("asks")
    while True:
        agent.start_quorum()
        step = agent.quorum_step or 0
        turn = (step + shape.turn) % 2
        wrapped[turn].zero_grad()
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(getattr(torch, shape.dtype))
        loss = parts[turn](noise).square().mean()
        loss.backward()
        agent.all_reduce(loss.detach().to(getattr(torch, shape.sums)).reshape(1)).result()
        is_committed = wrapped[turn].step()
        events.note(
            "commits" if is_committed else "discards",
            step=agent.current_step,
            quorum_id=agent.quorum_id,
            participants=list(agent.participants),
        )
        last = int(stop.read_text()) if stop.exists() else None
        if is_committed and agent.current_step == last:
            events.note("ends", step=last, digest=digest(state_of(model, optimizers)))
        if last is not None and agent.current_step >= last + STEPS_AFTER:
            break
        time.sleep(STEP_S)
    agent.close()


if __name__ == "__main__":
    told, written, stopped = map(Path, sys.argv[1:])
    noted = Events(written)
    try:
        main(Shape(**json.loads(told.read_text())), noted, stopped)
    except AgentError as e:
        noted.note("fails", error=type(e).__name__)
        raise
