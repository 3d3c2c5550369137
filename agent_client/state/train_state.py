"""The registered training state, which healing peers copy and checkpoints contain.

Peers read most of the state in place until the step's vote, so parameters must not change before the vote. `TrainState`
detects parameters that do. It compares the version counters and memory addresses of all parameters. In the first steps,
it also compares elements of the parameters that no optimizer updates, because writes to `.data` leave no other trace.

`Scalers` ensures that GradScalers change only in committed steps. A script calls update() after each step(), even if
the step was discarded. `Scalers` undoes the update for a discarded step when the next step begins, because some groups
may have missed the discarded step, and gradients with different scales have no meaningful mean.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from agent_client.errors import ConfigurationError
from agent_client.state.codec import encode
from agent_client.state.module_tree import ModuleTree
from agent_client.state.shards import Shards, is_sharded
from agent_client.state.snapshot import has_no_gaps, in_memory_order, install_matches, snapshot
from agent_client.state.tree import State, disassemble, format_path

log = logging.getLogger(__name__)


SAMPLED_STEPS = 3
EXTRA_STATE = "_extra_state"  # end of the keys under which torch stores what get_extra_state() returns
SAMPLE = 8  # number of elements that are compared per parameter that no optimizer updates


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class TrainState:
    """The state that a replica group copies from a peer when it recovers.

    The state consists of the model, the optimizer, and everything else that changes during training and has
    `state_dict` and `load_state_dict`, such as schedulers, a GradScaler or a counter. If the model is sharded inside
    the group (FSDP2), each rank sends and receives its own shards.

    Buffers, extra states of modules and the additional entries other than optimizers are copied when a step begins,
    because the forward pass or the training loop may change them. Peers read parameters and the states of optimizers in
    place until the step's vote, so the script must not change these before the vote.

    Example:
        ```python
        state = TrainState(model, optimizer, scheduler=scheduler, scaler=scaler)
        agent = Agent.from_env(state=state)
        ```
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> None:
        """Register the training state.

        Args:
            model: The model itself, not its DistributedDataParallel wrapper.
            optimizer: The torch optimizer that a FaultTolerantOptimizer wraps.
            **others: Additional entries. Their names must be the same in all groups, and their `state_dict` may contain
                only tensors, numbers, strings, lists and dicts.

        Raises:
            ConfigurationError: An argument is of another kind, for example None.
        """
        _refuse_without("named_parameters", model=model)
        _refuse_without("param_groups", optimizer=optimizer)
        _refuse_without("state_dict", **others)
        self.model = model
        self.optimizer = optimizer
        self.others = others
        self.standing: dict[str, Stateful] = {}
        self.stands_still = True
        """False if parameters change between a step's quorum and its vote. Peers must then not read them in place."""
        self.moves_in_forward = False
        """True if the forward pass changes parameters. It must then wait until the state has been copied for a peer."""
        self._marks: list[tuple[Tensor, int, int]] = []
        """Parameters with their version counters and addresses when the step began. A write changes one of the two."""
        self._samples: list[tuple[Tensor, Tensor]] = []
        """In the first steps: parameters that no optimizer updates, with some elements from when the step began."""
        self._steps_begun = 0
        self._looked_for_schedulers = False
        self._moving: dict[str, State] = {}
        self._unlisted: list[str] = []
        """Keys of the model's state that may change before the vote, but are not names of buffers."""
        self._sharded: dict[str, State] = {}
        self._buffer_tree = ModuleTree(model, "_buffers")
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._shards = self.find_shards()

    @property
    def has_shards(self) -> bool:
        return bool(self._shards)

    def has_optimizer(self, optimizer: object) -> bool:
        """Return whether this optimizer, or a wrapper around it, is part of the state."""
        registered = (self.optimizer, *self.others.values())
        return any(optimizer is getattr(each, "wrapped", each) for each in registered)

    def has_part(self, part: object) -> bool:
        """Return whether `part`, such as a scheduler, is a registered entry, or is held in an attribute of one."""
        for registered in self.others.values():
            held = [registered, *getattr(registered, "__dict__", {}).values()]
            held += [each for container in held if isinstance(container, list | tuple) for each in container]
            if any(part is each for each in held):
                return True
        return False

    def compared(self) -> list[torch.Tensor]:
        """Return the tensors that must be bitwise equal on all ranks at the same tag (step and quorum_id).

        These are the parameters, or the global parameters if the ranks take local steps. The optimizer state is left
        out: some optimizers store rank-specific values, and an error changes the parameters in the next step anyway.
        """
        if self.standing:
            return [tensor for other in self.standing.values() for tensor in getattr(other, "tensors", ())]
        return list(dict.fromkeys([*self.model.parameters(), *self.optimized()]))

    def begin_step(self) -> None:
        """Copy what may change before the vote: buffers, extra states, and the entries that are not optimizers."""
        if self._buffer_tree.has_changed():
            self._buffers = dict(self.model.named_buffers(remove_duplicate=False))
        named = self._buffers
        buffers = {name: buffer.detach().clone() for name, buffer in named.items()}
        if not self._moving:  # the first step: the script has built its model by now
            self._shards = self.find_shards()
            self.register_schedulers()
            self._unlisted = self._find_unlisted(named)
        shards = self._shards
        if self._unlisted:
            now = self.model.state_dict()
            buffers |= snapshot({key: now[key] for key in self._unlisted})
        moving = {name: other for name, other in self.others.items() if not isinstance(other, Optimizer)}
        others = {name: shards.describe(other.state_dict()) for name, other in moving.items()}
        buffers = shards.describe(buffers) if shards else buffers
        self._moving = {"buffers": buffers, "others": snapshot({"others": others})["others"]}
        self._mark()
        # Do this now, because calling state_dict() during FSDP's forward pass would reshard gathered parameters.
        self._sharded = shards.describe(dict(self.model.state_dict())) if shards else {}

    def _find_unlisted(self, named: dict[str, Tensor]) -> list[str]:
        # torch's checkpoint_wrapper, for one, has another name for a buffer in state_dict() than in named_buffers().
        places = set(map(_place_of, named.values())) - {0}
        state = {key: value for key, value in self.model.state_dict().items() if key not in named}
        return [key for key, value in state.items() if key.endswith(EXTRA_STATE) or _place_of(value) in places]

    def replace_others_begun(self, states: dict[str, State]) -> None:
        """Replace the copies of the additional entries that `begin_step` has made with copies of `states`."""
        self._moving["others"] = snapshot(states)

    def in_place(self) -> dict[str, State]:
        """Return the state as it was when the step began, mostly without a copy.

        Only what may change before the vote was copied, so the result is valid until the vote. Until then, any thread
        may call this.
        """
        if not self._moving:
            self.begin_step()
        model: dict[str, Any] = dict(self._sharded or self.model.state_dict())
        buffers: Any = self._moving["buffers"]
        model |= {name: buffers[name] for name in model.keys() & buffers.keys()}
        standing = {name: other.state_dict() for name, other in self.standing.items()}
        copied: Any = self._moving["others"]
        others = {
            name: copied[name] if name in copied else self._shards.describe(other.state_dict())
            for name, other in self.others.items()
        }
        return {
            "model": model,
            "optimizer": self._shards.describe(self.optimizer.state_dict()),
            "others": others,
            "standing": self._shards.describe(standing),
        }

    def snapshot(self) -> dict[str, State]:
        """Return a copy of the state as it was when the step began."""
        return snapshot(self.in_place())

    def check_sendable(self) -> None:
        """Raise ConfigurationError, which names the entry, if a peer could not receive or install this state."""
        try:
            state = self.in_place()
            disassemble(state)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"no group could heal from this state: {error}") from error
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            is_plain = not is_sharded(tensor) and tensor.layout is torch.strided
            if is_plain and any(
                stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            ):
                raise ConfigurationError(
                    f"no group could heal to this state: {format_path(['model', name])} is expanded, so several of its "
                    "elements share memory, and nothing can be written to it: register a .contiguous() copy"
                )

    def register_schedulers(self) -> None:
        """Find all schedulers of registered optimizers in this process, and register them. Later calls do nothing."""
        if self._looked_for_schedulers:
            return
        self._looked_for_schedulers = True
        for scheduler in self.unregistered_schedulers(live_objects(LRScheduler)):
            name = type(scheduler).__name__
            if name in self.others:
                raise ConfigurationError(
                    f"several {name} drive the registered optimizer and are not in the Agent's TrainState: register "
                    "each, as in TrainState(model, optimizer, first=first, second=second)"
                )
            self.others[name] = scheduler
            log.info("a %s drives the registered optimizer: it heals as %r in the TrainState", name, name)

    def unregistered_schedulers(self, live: Sequence[Any]) -> list[Any]:
        """Return those of the schedulers `live` that drive a registered optimizer but are not registered themselves.

        Schedulers inside another scheduler, such as SequentialLR, are left out.
        """
        parts = {id(part) for each in live for part in vars(each).get("_schedulers", ())}
        found: list[Any] = []
        for scheduler in live:
            driven = vars(scheduler).get("optimizer")  # FaultTolerantScheduler has none, because it wraps another
            is_own = driven is not None and self.has_optimizer(getattr(driven, "wrapped", driven))
            if is_own and id(scheduler) not in parts and not self.has_part(scheduler):
                found.append(scheduler)
        return sorted(found, key=lambda scheduler: type(scheduler).__name__)

    def find_moved(self) -> str:
        """Return the name of a parameter that has changed since the step began, or an empty string if none has.

        Only the first change is reported. It sets `stands_still` to False, and later calls return an empty string.
        """
        moved = {id(tensor) for tensor, version, place in self._marks if _mark_of(tensor) != (version, place)}
        moved |= {id(tensor) for tensor, sample in self._samples if not torch.equal(_sample(tensor), sample)}
        if not moved or not self.stands_still:
            return ""
        self.stands_still, self.moves_in_forward = False, True
        return next((name for name, tensor in self.model.named_parameters() if id(tensor) in moved), "a parameter")

    def find_moved_extra_state(self) -> str:
        """Return the key of a module's extra state that has changed since the step began, or an empty string."""
        keys = [key for key in self._unlisted if key.endswith(EXTRA_STATE)]
        if not keys:
            return ""
        begun: Any = self._moving["buffers"]
        now: Any = self._shards.describe(dict(self.model.state_dict()))
        return next((key for key in keys if _bytes_of(begun[key]) != _bytes_of(now[key])), "")

    def _mark(self) -> None:
        if self.has_shards or not self.stands_still:
            self._marks, self._samples = [], []
            return
        if not self._marks:
            self._marks = [(tensor, 0, 0) for tensor in self.model.parameters() if type(tensor) is torch.nn.Parameter]
        self._marks = [(tensor, *_mark_of(tensor)) for tensor, _, _ in self._marks]
        self._steps_begun += 1
        self._samples = []
        if self._steps_begun <= SAMPLED_STEPS:
            optimizers: Any = (self.optimizer, *self.others.values())
            groups: list[list[dict[str, Any]]] = [getattr(each, "param_groups", []) for each in optimizers]
            optimized = {id(tensor) for group in chain(*groups) for tensor in group["params"]}
            resting = [tensor for tensor, _, _ in self._marks if id(tensor) not in optimized]
            resting = [tensor for tensor in resting if has_no_gaps(tensor.shape, tensor.stride())]
            self._samples = [(tensor, _sample(tensor).clone()) for tensor in resting]

    def check(self, received: dict[str, State]) -> None:
        """Raise StateMismatch or CorruptState if `received` cannot be installed. Thread-safe."""
        self.check_layout(received)
        self._shards.rebuild(received)

    def check_layout(self, received: dict[str, State]) -> None:
        """Raise StateMismatch if keys, shapes or dtypes differ from this state. Values are not checked. Thread-safe."""
        install_matches(self.in_place(), received)

    def install(self, received: dict[str, Any]) -> None:
        """Load a peer's state. `check` must have accepted it."""
        received = self.find_shards().rebuild(received)
        self.model.load_state_dict(received["model"])
        load_uncast(self.optimizer, received["optimizer"])
        for name, other in self.others.items():
            load_uncast(other, received["others"][name])
        for name, other in self.standing.items():
            other.load_state_dict(received["standing"][name])

    def state_dict(self) -> dict[str, State]:
        """Return the current state for a checkpoint on disk. Tensors are not copied. Call this between two steps."""
        self.begin_step()
        return self.in_place()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            StateMismatch: The state belongs to a different model or optimizer. Nothing was changed.
            CorruptState: The state contains invalid shards. Nothing was changed.
        """
        self.begin_step()
        self.check(state_dict)
        self.install(state_dict)

    def find_shards(self) -> Shards:
        return Shards([*self.optimized(), *self.model.parameters()])

    def optimized(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _refuse_without(attribute: str, **entries: object) -> None:
    for name, entry in entries.items():
        if not hasattr(entry, attribute):
            raise ConfigurationError(
                f"TrainState: {name} is a {type(entry).__name__} and has no {attribute}: pass one module, one "
                "optimizer, and all else that changes, by name, as objects with state_dict() and load_state_dict()"
            )


def load_uncast(part: Stateful, received: dict[str, Any]) -> None:
    """Load a state. If `part` is an optimizer, keep the dtypes and strings of the received state.

    torch's Optimizer.load_state_dict casts each tensor to the dtype of its parameter, which would, for example, round
    the float32 moments of bfloat16 parameters. It also replaces each string by the text of a generator object.
    """
    part.load_state_dict(received)
    if not isinstance(part, Optimizer) or type(part).state_dict is not Optimizer.state_dict:
        return
    received_ids = chain.from_iterable(group["params"] for group in received["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in part.param_groups)
    for number, parameter in zip(received_ids, parameters, strict=True):
        if number in received["state"]:
            part.state[parameter] = _uncast(part.state[parameter], received["state"][number])


def _uncast(loaded: Any, received: Any) -> Any:
    if isinstance(received, Tensor):
        is_cast = isinstance(loaded, Tensor) and loaded.dtype != received.dtype
        return received.to(loaded.device) if is_cast else loaded
    if isinstance(received, str):
        return received
    if type(loaded) is type(received) is dict:
        return {key: _uncast(value, received[key]) if key in received else value for key, value in loaded.items()}
    if type(loaded) is type(received) and isinstance(received, list | tuple):
        return type(received)(map(_uncast, loaded, received))
    return loaded


def live_objects(*kinds: type) -> list[Any]:
    """Return all objects in this process that are instances of one of the `kinds`. This takes about 50 ms."""
    wanted, new = set[type](), list(kinds)
    while new:
        wanted.update(new)
        new = [each for kind in new for each in type.__subclasses__(kind) if each not in wanted]
    return [thing for thing in gc.get_objects() if type(thing) in wanted]


def _bytes_of(state: State) -> bytes:
    return b"".join(encode(snapshot(state)))


def _place_of(value: object) -> int:
    return value.data_ptr() if type(value) is Tensor and value.layout is torch.strided else 0


def _mark_of(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


def _sample(tensor: Tensor) -> Tensor:
    return in_memory_order(tensor.detach()).reshape(-1)[:SAMPLE]


@dataclass(slots=True)
class Scalers:
    state: TrainState
    _begun: list[tuple[torch.amp.GradScaler, dict[str, Any]]] = field(default_factory=list)

    def begin_step(self) -> None:
        self._begun = [(scaler, scaler.state_dict()) for scaler in self._find()]

    @property
    def may_skip(self) -> bool:
        """True if a scaler is enabled and may therefore skip steps whose gradients are not finite."""
        return any(scaler.is_enabled() for scaler in self._find())

    @property
    def has_state_changed(self) -> bool:
        """True if a scaler's state has changed since the step began, for example because it has skipped the step."""
        return any(scaler.state_dict() != begun for scaler, begun in self._begun)

    def restore(self) -> None:
        for scaler, begun in self._begun:
            scaler.load_state_dict(begun)

    def forget_begun(self) -> None:
        self._begun = []

    def _find(self) -> list[torch.amp.GradScaler]:
        """Return the registered scalers, and those in attributes of registered entries (as in timm's NativeScaler)."""
        entries: Any = self.state.others.values()
        held: chain[Any] = chain(entries, *(getattr(entry, "__dict__", {}).values() for entry in entries))
        return [each for each in held if issubclass(type(each), torch.amp.GradScaler)]
