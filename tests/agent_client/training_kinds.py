"""Ways to train, each an actor of a training_jobs.TrainingJob, which can be held in the middle of a step or of a
transfer of its state."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from agent_client.collectives.gloo import connect_store
from agent_client.healing import catch_up
from agent_client.healing import healing as both_sides
from agent_client.healing.fetch import Fetch
from agent_client.state.codec import Encoding
from agent_client.state.train_state import TrainState
from agent_client.training.ddp import DistributedDataParallel
from agent_client.training.hsdp import replicate
from agent_client.training.local_sgd import DiLoCo, LocalSGD, OuterSteps
from agent_client.training.optimizer import FaultTolerantOptimizer, FaultTolerantScheduler
from agent_client.training.sampler import Position
from tests.agent_client.actors import build_agent, digest
from tests.processes import PATIENCE_S

INPUTS, HIDDEN, BATCH = 8, 16, 16
CLIPS_AT = 0.05
INTERVAL = 4
"""Inner steps from one outer step to the next."""
CHUNK_BYTES = 2**18
CHUNKS_BEFORE_HOLD = 3
HELD_AT_REDUCTION = 2
"""Of one step, of which every way has several: the rank is held between two of them."""


class Ballast:
    """8 MiB that heal along, in several pieces, of which no step takes notice."""

    def __init__(self, seed: int) -> None:
        self.numbers = torch.full((2 * 2**20,), float(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.numbers.copy_(state_dict["numbers"])


class Ddp:
    """Trains until it is killed or has committed the step that `finish` names; writes a line for each step."""

    ranks: ClassVar[int] = 1
    """Of a replica group."""
    options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 0.0001}
    """DistributedDataParallel's: several buckets."""
    inner_steps: ClassVar[int] = 1
    """Of each step that is voted on."""
    gives_up: ClassVar[bool] = False
    """Catching up: what it would apply depends on its state, which is not the peer's yet; it heals plainly."""

    def build(
        self,
        manager: str,
        *,
        events: str,
        seed: int,
        rank: int,
        ranks: int,
        meeting: str,
        key: str,
        heal_mode: str = "blocking",
        ballast: bool = False,
        **options: Any,
    ) -> None:
        """`ballast`: a state that takes several pieces to send."""
        torch.manual_seed(seed)
        self.heal_mode = heal_mode
        self.module = self.make_module()
        self.shard(rank, ranks, meeting, key)
        self.inner = self.make_inner()
        self.others = self.make_others()
        state = TrainState(self.module, self.inner, **self.others)
        self.standing = {"ballast": Ballast(seed)} if ballast else {}
        state.standing.update(self.standing)
        self.agent = build_agent(manager, state, rank, ranks, meeting, key, heal_mode=heal_mode, **options)
        self._gate_reduction()
        self._gate_sending()
        self._gate_fetch()
        self.model = self.wrap()
        self.position: Position = self.agent
        self.optimizer = self.make_optimizer()
        self.events = Path(events)
        self.last_step: int | None = None

    # -- what is different from way to way

    def make_module(self) -> nn.Module:
        layers = nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        return nn.Sequential(*layers)

    def shard(self, rank: int, ranks: int, meeting: str, key: str) -> None:
        """Inside the group, whose ranks meet at the store `meeting` under `key`."""

    def make_inner(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=0.01)

    def make_others(self) -> dict[str, Any]:
        """What belongs to the state beside the model and the optimizer."""
        return {}

    def wrap(self) -> nn.Module:
        """What the loop calls."""
        return DistributedDataParallel(self.module, self.agent, **self.options)

    def make_optimizer(self) -> FaultTolerantOptimizer:
        return FaultTolerantOptimizer(self.inner, self.agent)

    def prepare(self) -> None:
        """At the top of the loop. Where steps are local, who comes back takes over the peers' state here."""
        self.optimizer.zero_grad()

    def iterate(self) -> bool:
        """The rest of the loop. Whether its step is kept."""
        self.compute()
        self.has_participated = self.agent.is_participating
        return self.apply()

    def compute(self) -> None:
        self.backward(self.loss())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def apply(self) -> bool:
        """Change the averaged gradients, and vote."""
        return self.optimizer.step()

    def after_commit(self) -> None:
        """What the script moves after each committed step."""

    # -- training

    def train(self, pace_s: float) -> dict[str, Any]:
        """What it wrote last."""
        agent, event = self.agent, dict[str, Any]()
        while self.last_step is None or agent.current_step < self.last_step:
            self.prepare()
            before = agent.current_step
            is_kept = self.iterate()
            has_committed = is_kept and agent.current_step != before  # lower, where it goes back to what it holds
            if has_committed:
                self.after_commit()
            if has_committed or not is_kept:
                event = self._write("discarded" if not is_kept else "follows" if agent.catches_up else "step")
                self.reductions = 0
            time.sleep(pace_s / self.inner_steps)
        return event

    def loss(self, microbatch: int = 0) -> Tensor:
        """Over a batch that is a function of the step and of a place in the quorum."""
        place, _ = self.position.slot()
        generator = torch.Generator().manual_seed(10_000 * self.position.current_step + 100 * microbatch + place)
        return self.model(torch.randn(BATCH, INPUTS, generator=generator)).square().mean()

    def finish(self, after_step: int) -> None:
        self.last_step = after_step

    def fail_once(self, rests_s: float = 0.0) -> None:
        """In its next vote it says no, and begins the step after it so much later."""
        should_commit = self.agent.should_commit

        def should_commit_not() -> bool:
            self.agent.report_error("told to fail")
            self.agent.should_commit = should_commit  # type: ignore[method-assign]
            is_committed = should_commit()
            time.sleep(rests_s)
            return is_committed

        self.agent.should_commit = should_commit_not  # type: ignore[method-assign]

    def graphs(self) -> int:
        """How many torch.compile has made."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def digests(self) -> dict[str, str]:
        """Of all that must be the same in all groups, part by part."""
        return {name: digest(*map(_local, tensors)) for name, tensors in self.parts().items()}

    def parts(self) -> dict[str, list[Tensor]]:
        moments = [tensor for state in self.inner.state.values() for tensor in state.values()]
        rates = [torch.tensor([group["lr"] for group in self.inner.param_groups], dtype=torch.float64)]
        found = {"parameters": [*self.module.parameters()], "optimizer": moments + rates}
        found["buffers"] = [*self.module.buffers()]
        others = self.others | self.standing
        return found | {name: list(_tensors_in(other.state_dict())) for name, other in others.items()}

    def _write(self, what: str) -> dict[str, Any]:
        self.followed += what == "follows"
        if self.followed >= self.follows_for:
            self.may_fetch.set()
        event = {what: self.agent.current_step} | self._describe()
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
        return event

    def _describe(self) -> dict[str, Any]:
        """The step that has just ended."""
        return {
            "time": time.time(),
            "quorum_id": self.agent.quorum_id,
            "participants": self.agent.num_participants,
            "participated": self.has_participated,
            "hash": self.digests(),
        }

    # -- in the middle of a step

    def hold_step(self) -> None:
        """The next step stops between two of its reductions."""
        self.is_held.clear()
        self.may_reduce.clear()

    def wait_held(self) -> int:
        """The step."""
        self.is_held.wait()
        return self.agent.current_step

    def go_on(self) -> None:
        self.may_reduce.set()

    def is_in_step(self, step: int) -> bool:
        """It has come as far as one that is held in that step."""
        return self.agent.current_step == step and self.reductions >= HELD_AT_REDUCTION

    def _gate_reduction(self) -> None:
        self.is_held, self.may_reduce = threading.Event(), threading.Event()
        self.may_reduce.set()
        self.reductions = 0
        all_reduce = self.agent.all_reduce

        def reduce_when_told(tensor: Tensor, **options: Any) -> "Future[Tensor]":
            self.reductions += 1
            if self.reductions == HELD_AT_REDUCTION and not self.may_reduce.is_set():
                self.is_held.set()
                self.may_reduce.wait()
            return all_reduce(tensor, **options)

        self.agent.all_reduce = reduce_when_told  # type: ignore[method-assign]

    # -- in the middle of a transfer, or before it

    def hold_sending(self) -> None:
        """Every transfer from here stops after some of its bytes."""
        self.may_send.clear()

    def allow_sending(self) -> None:
        self.may_send.set()

    def advertise_nowhere(self) -> None:
        """Peers that heal from here find nobody, from the next quorum on."""
        healing: Any = self.agent.internals.healing
        healing._server.address = "http://127.0.0.1:1"

    def received(self) -> tuple[str, int, int]:
        """(from which group, how many bytes so far, of how many) of the transfer to here that is under way."""
        healing: Any = self.agent.internals.healing
        fetch = healing._fetch
        transfer = fetch and fetch._transfer
        return (transfer._lead, transfer._reported, transfer._total) if transfer else ("", 0, 0)

    def _gate_sending(self) -> None:
        self.may_send = threading.Event()
        self.may_send.set()
        healing: Any = self.agent.internals.healing
        if self.standing:
            healing._server._chunk_bytes = CHUNK_BYTES

        def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
            for number, chunk in enumerate(real(encoding, start, stop)):
                if number >= CHUNKS_BEFORE_HOLD:
                    self.may_send.wait()
                yield chunk

        Encoding.stripe = stripe  # type: ignore[method-assign]

    def follow_for(self, steps: float) -> None:
        """A transfer from a peer waits until so many are kept, or it is allowed."""
        self.follows_for = steps
        self.may_fetch.clear()

    def allow_fetch(self) -> None:
        self.may_fetch.set()

    def have_no_room(self) -> None:
        """From now on there is no memory for another copy of anything."""
        for module in (both_sides, catch_up):
            module.has_room = lambda size: False

    def _gate_fetch(self) -> None:
        self.followed, self.follows_for, self.may_fetch = 0, math.inf, threading.Event()
        self.may_fetch.set()

        def run_when_told(fetch: Fetch, run: Callable[[Fetch], Any] = Fetch.run) -> Any:
            self.may_fetch.wait(PATIENCE_S)
            return run(fetch)

        Fetch.run = run_when_told  # type: ignore[method-assign]


# -- what changes the gradients, before the vote


class GrowingScaler(torch.amp.GradScaler):
    """torch's, which can be moved again."""

    def replay_step(self) -> None:
        """As update() does where no gradient was infinite."""
        scale, tracker = self._get_scale_growth_tracker()
        factors = self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval()
        torch._amp_update_scale_(scale, tracker, torch.zeros(1), *factors)

    def _get_scale_growth_tracker(self) -> tuple[Tensor, Tensor]:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert self._scale is not None
        assert self._growth_tracker is not None
        return self._scale, self._growth_tracker


class Scaled(Ddp):
    """The scale grows, so that a fresh one is another. One that catches up must be told how."""

    gives_up: ClassVar[bool] = True

    def make_others(self) -> dict[str, Any]:
        scaler_class = GrowingScaler if self.heal_mode == "catch_up" else torch.amp.GradScaler
        self.scaler = scaler_class("cpu", 8.0, growth_factor=2.0, growth_interval=4)
        return {"scaler": self.scaler}

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def apply(self) -> bool:
        is_committed = bool(self.scaler.step(self.optimizer))
        self.scaler.update()
        return is_committed


class ScaledLater(Scaled):
    """All have the scale that they have begun with until it grows."""

    grows_from = math.inf

    def grow_from(self, step: int) -> None:
        self.grows_from = step

    def apply(self) -> bool:
        self.scaler.set_growth_factor(2.0 if self.agent.current_step >= self.grows_from else 1.0)
        return super().apply()


class AdaptivelyClipped(Ddp):
    """AGC: each gradient by the norm of its weight."""

    gives_up: ClassVar[bool] = True

    def apply(self) -> bool:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                limit = CLIPS_AT * parameter.detach().norm().clamp(min=1e-3)
                parameter.grad *= (limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0)
        return super().apply()


class ClippedByNorm(Ddp):
    def apply(self) -> bool:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIPS_AT)
        return super().apply()


# -- what moves with the committed steps


class Averaged(AveragedModel):
    """torch's, which says how it moves."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.of = [model]  # in a list: not a second child module

    def replay_step(self) -> None:
        self.update_parameters(self.of[0])


class Ema(Ddp):
    averages: ClassVar[dict[str, Any]] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}

    def make_others(self) -> dict[str, Any]:
        self.averaged = Averaged(self.module, **self.averages)
        return {"averaged": self.averaged}

    def after_commit(self) -> None:
        self.averaged.replay_step()


class EmaOfBuffers(Ema):
    averages: ClassVar[dict[str, Any]] = Ema.averages | {"use_buffers": True}


class Swa(Ema):
    averages: ClassVar[dict[str, Any]] = {}


class Scheduled(Ddp):
    def make_others(self) -> dict[str, Any]:
        return {"scheduler": ExponentialLR(self.inner, 0.99)}

    def make_optimizer(self) -> FaultTolerantOptimizer:
        self.scheduler = FaultTolerantScheduler(self.others["scheduler"], self.agent)
        return super().make_optimizer()

    def rate(self) -> float:
        return self.inner.param_groups[0]["lr"]

    def after_commit(self) -> None:
        self.scheduler.step()


# -- how the gradients are computed


class Bfloat16(Ddp):
    def loss(self, microbatch: int = 0) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(microbatch)


class ChannelsLast(Ddp):
    """A fused optimizer goes by memory order, which what heals must keep."""

    def make_module(self) -> nn.Module:
        layers = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 16, 2), nn.Flatten(), nn.Linear(16, 1)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def make_inner(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=0.01, fused=True)


class MomentumEncoder(nn.Module):
    """MoCo's: the forward pass moves it, as a peer may read it just then."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(INPUTS, 256), nn.Linear(INPUTS, 256).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.fast(images) - self.slow(images)


class Moco(Ddp):
    def make_module(self) -> nn.Module:
        return MomentumEncoder()

    def make_inner(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.fast.parameters(), lr=0.01)  # type: ignore[union-attr]


class UnregisteredScheduler(Ddp):
    """It registers itself before the first step."""

    def make_inner(self) -> torch.optim.Optimizer:
        inner = super().make_inner()
        self.scheduler = ExponentialLR(inner, 0.9)
        return inner

    def after_commit(self) -> None:
        self.scheduler.step()


class Accumulating(Ddp):
    def compute(self) -> None:
        for microbatch in range(3):
            with nullcontext() if microbatch == 2 else self.model.no_sync():
                self.backward(self.loss(microbatch))


class Salvaging(Ddp):
    options: ClassVar[dict[str, Any]] = {"salvage": True, "bucket_cap_mb": 0.0001}


class Wide(nn.Module):
    """torch.compile leaves alone what has no forward pass of its own, as a bare Sequential."""

    def __init__(self, wide: int = 600) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, wide), nn.BatchNorm1d(wide)
        self.hidden, self.last = nn.Linear(wide, wide), nn.Linear(wide, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(images)))
        return self.last(torch.tanh(self.hidden(hidden)))


class Compiled(Ddp):
    """Of several buckets of the least size that torch's splitting of graphs by buckets takes, 1 MiB."""

    options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 1}
    backend = "aot_eager"

    def make_module(self) -> nn.Module:
        return Wide()


class CompiledInside(Compiled):
    """The module is compiled, then wrapped."""

    def wrap(self) -> nn.Module:
        compiled: Any = torch.compile(self.module, backend=self.backend)
        return DistributedDataParallel(compiled, self.agent, **self.options)


class CompiledAround(Compiled):
    """What is wrapped is compiled, as the HF Trainer and accelerate do."""

    def wrap(self) -> nn.Module:
        compiled: Any = torch.compile(super().wrap(), backend=self.backend)
        return compiled


class CompiledInPlace(Compiled):
    """What is wrapped has its forward pass compiled."""

    def wrap(self) -> nn.Module:
        model = super().wrap()
        model.compile(backend=self.backend)
        return model


class CompiledStep(Compiled):
    """A function that computes the loss and its gradients is compiled, and so is the optimizer's step."""

    def build(self, *args: Any, **options: Any) -> None:
        super().build(*args, **options)
        compute, step = super().compute, self.optimizer.step
        self.compiled_compute: Any = torch.compile(compute, backend=self.backend)
        self.compiled_step: Any = torch.compile(step, backend=self.backend)

    def compute(self) -> None:
        self.compiled_compute()

    def apply(self) -> bool:
        return self.compiled_step()


class Inductor(CompiledAround):
    backend = "inductor"


class InductorInside(CompiledInside):
    backend = "inductor"


# -- other ways


class Plain(Ddp):
    """The plain calls of the Agent: each gradient is handed to it, and then it is asked whether to go on. No buffers:
    what follows keeps none equal."""

    def make_module(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def wrap(self) -> nn.Module:
        return self.module

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for reduced in [self.agent.all_reduce(_gradient(each)) for each in self.module.parameters()]:
            reduced.result()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def shard_layers(model: nn.Module, rank: int, ranks: int, meeting: str, key: str) -> None:
    """Layer by layer over the ranks of the group; one shard is empty."""
    store = PrefixStore(f"{key}/torch", connect_store(meeting, PATIENCE_S))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)


class Hsdp(Plain):
    ranks: ClassVar[int] = 2

    def shard(self, rank: int, ranks: int, meeting: str, key: str) -> None:
        shard_layers(self.module, rank, ranks, meeting, key)

    def wrap(self) -> nn.Module:
        replicate(self.module, self.agent)
        return self.module

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class HsdpClipped(Hsdp):
    def apply(self) -> bool:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIPS_AT)
        return super().apply()


class Block(nn.Linear):
    """A layer whose forward pass is the script's own, so that torch.compile takes it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input))


class HsdpCompiled(Hsdp):
    """Block by block, as large models are compiled."""

    backend = "aot_eager"

    def make_module(self) -> nn.Module:
        return nn.Sequential(Block(INPUTS, HIDDEN), Block(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1))

    def shard(self, rank: int, ranks: int, meeting: str, key: str) -> None:
        for layer in self.module.children():
            layer.compile(backend=self.backend)
        super().shard(rank, ranks, meeting, key)


class HsdpCompiledAround(HsdpCompiled):
    def shard(self, rank: int, ranks: int, meeting: str, key: str) -> None:
        Hsdp.shard(self, rank, ranks, meeting, key)

    def wrap(self) -> nn.Module:
        compiled: Any = torch.compile(super().wrap(), backend=self.backend)
        return compiled


class LocalSgd(Plain):
    inner_steps: ClassVar[int] = INTERVAL

    def make_optimizer(self) -> FaultTolerantOptimizer:
        self.position = self.outer = self.make_outer()
        return self.outer

    def make_outer(self) -> OuterSteps:
        return LocalSGD(self.module, self.inner, self.agent, sync_every=INTERVAL)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def parts(self) -> dict[str, list[Tensor]]:
        """The inner optimizer is each rank's own."""
        return {"parameters": [*self.module.parameters()]} | self.outer_parts()

    def outer_parts(self) -> dict[str, list[Tensor]]:
        """All that the replica groups agree on: global parameters, and the outer optimizer's momenta."""
        state = self.outer._state
        entries = state.optimizer.state.values() if state.optimizer else []
        tensors = [*state.tensors, *(entry["momentum_buffer"] for entry in entries if entry)]
        ballast = [ballast.numbers for ballast in self.standing.values()]
        return {"outer": tensors, "inner steps": [torch.tensor(self.outer.current_step)], "ballast": ballast}


class Diloco(LocalSgd):
    schedule: ClassVar[dict[str, Any]] = {}

    def make_outer(self) -> OuterSteps:
        outer = SGD(self.module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        sync_every = self.schedule.get("fragments", 1) * INTERVAL
        return DiLoCo(self.module, self.inner, outer, self.agent, sync_every=sync_every, **self.schedule)


class Streamed(Diloco):
    """Its local parameters are each rank's own, too."""

    schedule: ClassVar[dict[str, Any]] = {"fragments": 2, "delay": 2, "mixing": 0.5}

    def parts(self) -> dict[str, list[Tensor]]:
        return self.outer_parts()


class Sharded(Streamed):
    """Inside the group, by FSDP2."""

    ranks: ClassVar[int] = 2
    schedule: ClassVar[dict[str, Any]] = {"fragments": 2, "delay": 1}

    def shard(self, rank: int, ranks: int, meeting: str, key: str) -> None:
        shard_layers(self.module, rank, ranks, meeting, key)


WAYS: dict[str, type[Ddp]] = {
    "plain": Plain,
    "ddp": Ddp,
    "salvage": Salvaging,
    "hsdp": Hsdp,
    "local_sgd": LocalSgd,
    "diloco": Diloco,
    "streamed": Streamed,
    "sharded": Sharded,
}
"""Through all that can happen to a group: test_matrix.py."""

KINDS: dict[str, type[Ddp]] = {
    "ddp": Ddp,
    "scaler": Scaled,
    "agc": AdaptivelyClipped,
    "clip_norm": ClippedByNorm,
    "ema": Ema,
    "ema_of_buffers": EmaOfBuffers,
    "swa": Swa,
    "scheduler": Scheduled,
    "bfloat16": Bfloat16,
    "channels_last": ChannelsLast,
    "moco": Moco,
    "unregistered_scheduler": UnregisteredScheduler,
    "accumulation": Accumulating,
    "salvage": Salvaging,
    "compile_inside": CompiledInside,
    "compile_around": CompiledAround,
    "compile_in_place": CompiledInPlace,
    "compile_step": CompiledStep,
    "inductor": Inductor,
    "inductor_inside": InductorInside,
    "hsdp_clip_norm": HsdpClipped,
    "hsdp_compile": HsdpCompiled,
    "hsdp_compile_around": HsdpCompiledAround,
}
"""Through a kill and a heal in either heal mode: test_training_kinds.py."""


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors_in(state: Any) -> Iterator[Tensor]:
    """Of a state_dict, its numbers among them."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, int | float):
        yield torch.tensor([state], dtype=torch.float64)
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)
