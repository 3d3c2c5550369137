"""A training script that is put together from what DRAW says: loop, optimizer, and what goes wrong in which step.

    DRAW='{"loop": "plain", "optimizer": "adamw", "fault": "nan", "at": [7]}' EVENTS=folder python drawn_script.py

Each rank writes a line for every committed step: its number, the quorum and a digest of parameters and optimizer.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_client import (
    Agent,
    DistributedDataParallel,
    FaultTolerantOptimizer,
    FaultTolerantScheduler,
    GroupDrained,
    StepSampler,
    TrainState,
)

BATCH = 8
SAMPLES = 640
CLASSES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


OPTIMIZERS: dict[str, Callable[[Net], list[torch.optim.Optimizer]]] = {
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)],
    "adamw": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01)],
    "fused": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)],
    "adafactor": lambda net: [torch.optim.Adafactor(net.parameters(), lr=0.01)],
    "two": lambda net: [
        torch.optim.SGD(net.body.parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW(net.head.parameters(), lr=0.01),
    ],
}
LOOPS = ("plain", "zero_at_end", "accumulate", "scaler", "clip", "metric", "evaluates", "scheduler", "two_losses")
FAULTS = ("none", "skip_forward", "skip_backward", "skip_batch", "nan", "raise_caught", "exit")


class Script:
    def __init__(self, draw: dict[str, Any]) -> None:
        self.loop, self.fault, self.at = draw["loop"], draw["fault"], set(draw["at"])
        self.last = draw["steps"]
        torch.manual_seed(0)
        self.data = torch.randn(SAMPLES, 16)
        self.labels = torch.randint(CLASSES, (SAMPLES,))
        torch.manual_seed(int(os.environ.get("LIGHTHOUSE_ATTEMPT", "0")) * 31 + os.getpid())
        self.net = Net()
        inner = OPTIMIZERS[draw["optimizer"]](self.net)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5) if self.loop == "scaler" else None
        )
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in inner]
        others = {f"optimizer{number}": each for number, each in enumerate(inner[1:])}
        others |= {f"scheduler{number}": each for number, each in enumerate(self.schedulers)}
        others |= {"scaler": self.scaler} if self.scaler is not None else {}
        self.state = TrainState(self.net, inner[0], **others)
        self.inner = inner
        self.agent = Agent.from_env(
            state=self.state, timeout_s=60.0, check_state_every=4, max_consecutive_discards=60, advertise="127.0.0.1"
        )
        self.model = DistributedDataParallel(self.net, self.agent, bucket_cap_mb=0.001)
        self.optimizer = FaultTolerantOptimizer(inner if len(inner) > 1 else inner[0], self.agent)
        self.stepping = [FaultTolerantScheduler(each, self.agent) for each in self.schedulers]
        self.events = (
            Path(os.environ["EVENTS"]) / f"{os.environ['REPLICA_GROUP_ID']}-{self.agent.group_rank}-{os.getpid()}"
        )
        self.done: set[int] = set()

    def train(self) -> None:
        with contextlib.suppress(GroupDrained), self.agent:
            for batch in StepSampler(SAMPLES, BATCH, self.agent):
                if self.agent.current_step >= self.last:
                    break
                self.step(batch)

    def goes_wrong(self) -> bool:
        """Once in each step that was drawn."""
        step = self.agent.current_step
        is_now = step in self.at and step not in self.done
        if is_now:
            self.done.add(step)
        return is_now

    def step(self, batch: torch.Tensor) -> None:
        if self.loop != "zero_at_end":
            self.optimizer.zero_grad()
        is_wrong = self.goes_wrong()
        if is_wrong and self.fault == "exit":
            os._exit(1)
        try:
            self.compute(batch, self.fault if is_wrong else "none")
        except MemoryError:
            self.optimizer.zero_grad()
            return
        if is_wrong and self.fault == "skip_forward":
            return
        if is_wrong and self.fault == "skip_backward":
            self.optimizer.zero_grad()
            return
        if self.loop == "clip":
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        if self.loop == "metric" and self.agent.quorum_step % 3 == 0:
            self.agent.all_reduce(torch.ones(3)).result()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.loop == "scheduler":
            for each in self.stepping:
                each.step()
        if self.loop == "zero_at_end":
            self.optimizer.zero_grad()
        if self.agent.was_committed:
            self.write()
        if self.loop == "evaluates" and self.agent.current_step % 4 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(self.data[:BATCH])
            self.model.train()
        time.sleep(0.02)

    def compute(self, batch: torch.Tensor, fault: str) -> None:
        parts = batch.chunk(2) if self.loop == "accumulate" else [batch]
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                outputs = self.model(self.data[part])
                if fault == "skip_forward":
                    return
                loss = nn.functional.cross_entropy(outputs, self.labels[part]) / len(parts)
                if self.loop == "two_losses":
                    loss = loss + 0.1 * outputs.square().mean()
                if fault == "skip_batch" and is_last:
                    self.agent.skip_batch("drawn")
                    return
                if fault == "nan":
                    loss = loss * float("nan")
                if fault == "raise_caught":
                    outputs.register_hook(_out_of_memory)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def write(self) -> None:
        tensors = [*self.net.parameters(), *_tensors([each.state for each in self.inner])]
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()
        line = json.dumps({"step": self.agent.current_step, "quorum": self.agent.quorum_id, "digest": digest})
        with open(self.events, "a") as file:
            file.write(line + "\n")


def _out_of_memory(_: torch.Tensor) -> None:
    raise MemoryError("drawn")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Script(json.loads(os.environ["DRAW"])).train()
