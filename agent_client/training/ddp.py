"""A DistributedDataParallel whose gradients the Agent reduces, bucket by bucket, during the backward pass.

torch's class rearranges its buckets after the first backward pass, in the order of that pass. A group that has just
restarted would then sum different gradients than its peers, and this would go unnoticed, because the sizes match. This
class arranges its buckets once, before the first pass, starting with the last parameter. It refuses options that change
or omit buckets.

A forward pass in training mode begins the step. If a backward pass raises after it has reduced some buckets, the step
is discarded before the next step begins, because the peers are waiting for the remaining buckets.

With `find_unused_parameters`, torch leaves the gradient of a parameter unchanged (usually None) if no rank used the
parameter. To find out, torch all-reduces a map of used parameters over its process group. All replica groups must have
the same result, so this all-reduce runs over all groups.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._utils import _flatten_dense_tensors as flatten  # pyright: ignore[reportPrivateUsage]
from torch._utils import _unflatten_dense_tensors as unflatten  # pyright: ignore[reportPrivateUsage]
from torch.distributed import GradBucket
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors  # pyright: ignore[reportPrivateUsage]

from agent_client.collectives.observed import ObservedGroup, never_compiled, not_itself_compiled
from agent_client.errors import AgentError, ConfigurationError, first_line
from agent_client.state.module_tree import ModuleTree
from agent_client.state.snapshot import has_no_gaps
from agent_client.step.agent import Agent
from agent_client.step.comparison import Part
from agent_client.step.rules.loop_order import PassOrder
from agent_client.step.rules.world_size import WorldSizeMode
from agent_client.step.script_check import BY_HAND, UNAVERAGED, AveragedGradients, refuse_model
from lighthouse_protocol.messages.membership import Tag

log = logging.getLogger(__name__)

REFUSED = (
    "delay_all_reduce_named_params",
    "mixed_precision",
    "process_group",
    "skip_all_reduce_unused_params",
    "static_graph",
)
MARK = 1
"""Value of a byte that only the first participant sets. The sum shows whether exactly one participant set it."""
HEAD_BYTES = 16
"""Size of the mark, padded with zeros so that tensors of any dtype after it are aligned."""

PASS_AFTER_REDUCTION = (
    f"{UNAVERAGED}a backward pass has changed them after they had been averaged: add the losses of one forward pass "
    "and call backward() once, and run only passes before the last one under no_sync()"
)
SUMMED_TWICE = (
    "constant_batch: two backward passes of a step average their gradients, and the Agent would divide those of the "
    "first one twice: run all passes but the step's last one under no_sync()"
)


def _flat_copy(buffers: list[Tensor]) -> Tensor:
    """Return the content of `buffers`, which have the same dtype and device, as a one-dimensional tensor."""
    flat = flatten(buffers)
    return flat.clone() if len(buffers) == 1 else flat  # torch does not copy a single buffer


def _assign(buffers: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(buffers, unflatten(flat, buffers))  # pyright: ignore[reportPrivateUsage]


class SharedBuffers:
    """Keeps the buffers that the forward pass changes (such as BatchNorm's statistics) equal in all replica groups.

    The groups train on different samples, so their statistics differ. Before the vote, all groups receive the buffers
    of the first participant that contributes. The buffers are sent as bytes, in a single reduction for all dtypes, so
    the copies are bitwise equal. `find` returns the buffers. It is called whenever they are read or written, because a
    script may replace them.
    """

    def __init__(self, agent: Agent, find: Callable[[], Sequence[Tensor]]) -> None:
        self._internals, self._machine = agent.internals, agent.internals.machine
        self._find = find
        self._before: tuple[Tag, int, list[Tensor]] | None = None
        self._coming: list[tuple[list[list[Tensor]], Future[Tensor]]] = []

    def begin_step(self) -> None:
        machine = self._machine
        began = machine.tag, machine.ended
        if self._before is None or self._before[:2] != began:
            with torch.no_grad():
                self._before = (*began, list(map(_flat_copy, self._group_buffers())))

    @torch.no_grad()
    def start(self) -> None:
        """Start receiving the buffers of the first participant. Do nothing if this group is the only participant."""
        self._coming = []
        if self._machine.has_peers:
            for device, on_device in groupby(self._group_buffers(), lambda alike: alike[0].device):
                found = list(on_device)
                head = torch.zeros(HEAD_BYTES, dtype=torch.uint8, device=device)
                head[0] = MARK
                packed = torch.cat([head, *(_flat_copy(alike).view(torch.uint8) for alike in found)])
                self._coming.append((found, self._internals.receive_from_first(packed)))

    @torch.no_grad()
    def end_step(self, *, is_committed: bool) -> None:
        if is_committed:
            for found, packed in self._coming:
                sizes = [sum(buffer.nbytes for buffer in alike) for alike in found]
                for alike, content in zip(found, packed.result()[HEAD_BYTES:].split(sizes), strict=True):
                    _assign(alike, content.view(alike[0].dtype))
        else:
            self.restore()
        self._before, self._coming = None, []

    @torch.no_grad()
    def restore(self) -> None:
        # If the tag has changed, a peer's state has been installed since then.
        if self._before is not None and self._before[0] == self._machine.tag:
            for alike, before in zip(self._group_buffers(), self._before[2], strict=True):
                _assign(alike, before)

    def _group_buffers(self) -> list[list[Tensor]]:
        """Group the buffers by device and dtype, the widest dtype first, so that each buffer is aligned."""
        found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in self._find():
            if buffer.numel():
                found.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        keys = sorted(found, key=lambda key: (str(key[0]), -key[1].itemsize, str(key[1])))
        return [found[key] for key in keys]


MIB = 2**20


@dataclass(slots=True)
class _Kept:
    parameters: list[Tensor]
    """Parameters of the bucket, in the bucket's order."""
    content: Tensor
    """Gradients before the reduction, as a one-dimensional tensor."""
    name: str
    rest: Sequence[Part]


@dataclass(slots=True)
class Salvage:
    """Keeps a step's gradients, so that they can be reduced again after the loss of a peer.

    The content of each bucket before its reduction is kept until the next backward pass. If a peer is lost, the kept
    buckets are reduced again under the next quorum, in the same order as in a backward pass. The reductions therefore
    match those of the peers, whether a peer also reduces again or computes the step again.
    """

    agent: Agent
    parameters: list[torch.nn.Parameter] = field(default_factory=list[torch.nn.Parameter])
    """Parameters in the order of torch's map of used parameters."""
    _buckets: list[_Kept] = field(default_factory=list[_Kept])
    _used: tuple[Tensor, str] | None = None
    _is_logged: bool = False
    _kept_in: int = -1
    _marks: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def count_kept(self) -> int:
        """Return how many reductions of the current step reduce_again() would repeat.

        Return 0 if the script has changed the reduced gradients, for example by clipping, because reduce_again() would
        undo the change.
        """
        if self._kept_in != self.agent.internals.progress.begun:
            return 0  # the kept buckets are those of an earlier step
        if any(self._marks.get(number) != mark for number, mark in self._mark_gradients().items()):
            return 0
        return len(self._buckets) + (self._used is not None)

    @never_compiled
    def mark_end(self) -> None:
        """Record the version of each gradient after a reduction, to detect later changes by the script."""
        self._marks = self._mark_gradients()

    def _mark_gradients(self) -> dict[int, tuple[int, int]]:
        parameters = [parameter for kept in self._buckets for parameter in kept.parameters]
        return {
            number: (gradient._version, gradient.data_ptr() if gradient.layout is torch.strided else 0)
            for number, parameter in enumerate(parameters)
            if (gradient := parameter.grad) is not None
        }

    def keep_bucket(self, bucket: GradBucket, name: str, rest: Sequence[Part]) -> None:
        if bucket.index() == 0:
            self._buckets, self._used = [], None
            self._kept_in = self.agent.internals.progress.begun
        self._buckets.append(_Kept(bucket.parameters(), bucket.buffer().clone(), name, rest))
        if bucket.is_last() and not self._is_logged:
            self._is_logged = True
            dense = [kept.content for kept in self._buckets if kept.content.layout is torch.strided]
            held_bytes = sum(content.nbytes for content in dense)
            log.info("salvage: %.1f MiB of gradients are kept for each step", held_bytes / MIB)

    def keep_used(self, used: Tensor, name: str) -> None:
        """Keep `used`, torch's map of the parameters that this rank has used, for reduce_again().

        `name` is the name of the map's reduction.
        """
        self._used = used.clone(), name

    def reduce_again(self) -> None:
        """Reduce the kept buckets under the current quorum, and store the means in the parameters' `grad`."""
        missing: dict[int, Tensor] = {}
        for kept in self._buckets:
            reduced = self.agent.all_reduce(kept.content.clone(), name=kept.name, followed_by=kept.rest).result()
            for parameter, mean in zip(kept.parameters, _gradient_views(reduced, kept.parameters), strict=True):
                if parameter.grad is None:
                    missing[id(parameter)] = mean
                else:
                    parameter.grad.copy_(mean)
        self._restore_used(missing)
        self.mark_end()

    def _restore_used(self, missing: dict[int, Tensor]) -> None:
        if self._used is None:
            return
        # Remove gradients of parameters that no group used, and set gradients of parameters that only peers used.
        used, name = self._used
        by_any = self.agent.all_reduce(used.clone(), name=name).result() > 0
        for parameter, here, anywhere in zip(self.parameters, used.tolist(), by_any.tolist(), strict=True):
            if anywhere and id(parameter) in missing:
                parameter.grad = missing[id(parameter)].clone()
            elif here and not anywhere:
                parameter.grad = None


def _gradient_views(content: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of `parameters` as views of a bucket's content.

    Like torch, use the memory order of a parameter if its memory has no gaps. A sparse gradient is a bucket of its own.
    """
    if content.layout is not torch.strided:
        return [content]
    pieces = content.split([parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.shape, parameter.stride())
        if has_no_gaps(parameter.shape, parameter.stride())
        else piece.view(parameter.shape)
        for parameter, piece in zip(parameters, pieces, strict=True)
    ]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Averages gradients over all ranks in all replica groups. Replaces torch's DistributedDataParallel.

    Inside a replica group, it works like torch's class. The Agent computes the average over the replica groups. A
    forward pass in training mode begins a step if none is in progress.

    Example:
        ```python
        agent = Agent.from_env(state=TrainState(model, sgd))
        replicated = DistributedDataParallel(model, agent)
        loss = loss_fn(replicated(inputs), labels)
        loss.backward()
        ```
    """

    def __init__(self, module: torch.nn.Module, agent: Agent, *, salvage: bool = False, **options: Any) -> None:
        """Wrap the model.

        Args:
            module: The unwrapped model. All ranks in all groups must have parameters of the same shapes and dtypes, in
                the same order.
            agent: The Agent of this rank.
            salvage: What to do if a peer is lost in a step. If True, the gradients that the other groups have computed
                are reduced again without the peer, and the step is committed. This takes memory for a second set of
                gradients. If False, the step is discarded and the script repeats it. A step is discarded even with True
                if it has reduced anything else, or if the script has changed the gradients (for example by clipping)
                or uses a GradScaler.
            **options: Options of torch's class, except `process_group`, `static_graph`, `mixed_precision`,
                `delay_all_reduce_named_params` and `skip_all_reduce_unused_params`. With `broadcast_buffers` (default
                True), all groups copy the buffers of the first group at each commit.

        Raises:
            ValueError: An option is not supported.
            ConfigurationError: The model is sharded, or the ranks in the group have different parameters.
        """
        for name in REFUSED:
            if options.get(name):
                raise ValueError(f"{name}: not supported with replica groups, which join and leave; leave it out")
        refuse_model(module)
        held: Agent = weakref.proxy(agent)  # the garbage collector cannot follow references in torch's C++ code
        group = _GroupAmongGroups(held)
        try:
            super().__init__(module, process_group=group, **options)
        except RuntimeError as e:
            if agent.group_world_size == 1:
                raise
            raise ConfigurationError(
                f"the ranks of this group do not hold the same parameters, or one of them has ended: {first_line(e)}. "
                f"Where they hold different parts of the model (pipeline stages, shards), {BY_HAND}"
            ) from e
        self._group = group
        group.parameters, are_sparse = self._build_params_for_reducer()
        group.label = name = _name_in(agent.state.model, module)
        self._lay_out_buckets()
        self._averaged = AveragedGradients(
            module, group.parameters, "DistributedDataParallel", ignored=self.parameters_to_ignore
        )
        self.salvage = Salvage(held, group.parameters) if salvage else None
        if self.salvage is not None:
            group.salvage = self.salvage
            agent.internals.salvage_by(self.salvage.reduce_again, self.salvage.count_kept)
        self._agent = agent
        self._reduction = _Reduction(held, self.salvage, name, group.parameters)
        if not any(are_sparse):
            self._reduction.keep_layout(self.reducer._get_zeros_like_grad_buckets())
        self._buffer_tree = ModuleTree(module, "_buffers")
        self._shared = SharedBuffers(agent, self._buffers_to_share)
        self.register_comm_hook(self._reduction, _reduce_bucket)
        agent.internals.add_part(self)

    @not_itself_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model. In training mode with gradients enabled, begin a step if none is in progress."""
        if torch.is_grad_enabled():
            self._begin_pass()
        outputs = super().forward(*inputs, **kwargs)
        if self.training and torch.is_grad_enabled():
            self._track_passes(outputs)
        return outputs

    @never_compiled
    def _begin_pass(self) -> None:
        if self.training:
            self._agent.internals.begin_forward(self, accumulates=not self.require_backward_grad_sync)
            self._shared.begin_step()
            self._drop_unreduced_pass()
            if self._reduction.is_expected and not self.require_backward_grad_sync:
                self._reset_reducer()  # otherwise torch would treat this pass as the missing one, and reduce it
        self._reduction.is_expected |= self.require_backward_grad_sync

    @never_compiled
    def _track_passes(self, outputs: Any) -> None:
        nodes = [node for each in _find_tensors(outputs) if (node := each.grad_fn) is not None]
        for node in nodes:
            node.register_prehook(self._reduction.begin_pass)
        if nodes and self.require_backward_grad_sync:
            metadata: Any = nodes[0].metadata
            metadata["lighthouse"] = mark = _Mark()
            self._reduction.passes.append(weakref.ref(mark))
            nodes[0].register_prehook(mark.refuse_skipped)

    def join(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigurationError, because torch's `join` requires a fixed set of ranks."""
        raise ConfigurationError(
            "join(): not supported with replica groups, which come and go: use StepLoader or StepSampler for the "
            "batches, and end the loop by agent.current_step"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "agent_client's DistributedDataParallel cannot be copied or pickled, because it belongs to an Agent: copy "
            "or save the model that it wraps (.module)"
        )

    # -- methods of StepPart

    @property
    def can_begin_step(self) -> bool:
        return self.training

    @property
    def pass_order(self) -> PassOrder:
        return self._reduction.pass_order

    @property
    def has_abandoned(self) -> bool:
        return any(mark() is None for mark in self._reduction.passes)

    @property
    def parameters_reduced(self) -> list[torch.nn.Parameter]:
        return self._group.parameters

    def skip_microbatch(self) -> bool:
        if self.require_backward_grad_sync:
            return False
        self._shared.restore()
        return True

    @torch.no_grad()
    def contribute_zeros(self) -> bool:
        passes = [mark for each in self._reduction.passes if (mark := each()) is not None]
        self._drop_unreduced_pass()
        if self._reduction.buckets is not None:
            return False
        try:
            buckets = self.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:  # torch learns the layout of a sparse gradient in the first backward pass
            return False
        for mark in passes:
            mark.is_skipped = True
        self._shared.restore()  # undo the changes by this batch
        for bucket in buckets:
            name, rest = self._reduction.bucket_name(bucket.index()), self._reduction.following(bucket.index())
            mean = self._agent.all_reduce(bucket.buffer(), name=name, followed_by=rest).result()
            for parameter, view in zip(bucket.parameters(), _gradient_views(mean, bucket.parameters()), strict=True):
                parameter.grad = view.clone()
        if self.find_unused_parameters:
            self._group.contribute_zeros()
        self._reduction.reset()
        return True

    def abandon_backward(self) -> None:
        if self._reduction.buckets is None:
            return
        if self._agent.group_world_size > 1:
            raise AgentError(
                "a backward pass was abandoned (it raised, and the script continued): the other ranks of the group "
                "wait for the rest of its gradients. Let the error end this process so that its group restarts"
            )
        self._reset_reducer()

    def share_buffers(self) -> None:
        """Start sharing the buffers with the other groups.

        Raises:
            RuntimeError: The backward pass has not used all parameters. The message is torch's.
            ConfigurationError: A parameter has a gradient that is not averaged.
        """
        self._averaged.refuse_others()
        self._reduction.refuse_unaveraged()
        self.reducer._check_reducer_finalized()
        self._shared.start()

    def end_step(self, *, is_committed: bool) -> None:
        self._shared.end_step(is_committed=is_committed)

    def _drop_unreduced_pass(self) -> None:
        """Discard a pass that raised before it had reduced anything, so that the next pass belongs to the same step.

        Do nothing in a group of several ranks, because resetting torch's reducer would wait for the other ranks. The
        next pass then raises torch's own error.
        """
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:
            if self._reduction.buckets is None and self._agent.group_world_size == 1:
                self._reset_reducer()

    def _reset_reducer(self) -> None:
        self._reduction.reset()
        self.reducer._reset_state()
        self._lay_out_buckets()

    def _buffers_to_share(self) -> list[Tensor]:
        if not self.broadcast_buffers:
            return []
        if self._buffer_tree.has_changed():
            self._assign_modules_buffers()
        return self.modules_buffers

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Return the parameters in bucket order, and whether the gradient of each is sparse.

        With `find_unused_parameters`, torch reverses the order itself.
        """
        parameters, are_sparse = super()._build_params_for_reducer()
        return (parameters, are_sparse) if self.find_unused_parameters else (parameters[::-1], are_sparse[::-1])

    def _lay_out_buckets(self) -> None:
        """Arrange the buckets now, as torch would do after the first backward pass.

        With `find_unused_parameters`, torch never rearranges buckets.
        """
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()


class _GroupAmongGroups(ObservedGroup):
    """Process group of this replica group, except that `allreduce` runs over all replica groups.

    torch's reducer calls `allreduce` only for the map of used parameters. Gradients go through the communication hook.
    """

    def __init__(self, agent: Agent) -> None:
        observed = agent.internals.group_for_torch()
        super().__init__(observed.ranks, observed.progress)
        self.agent = agent
        self.parameters: list[torch.nn.Parameter] = []  # in the order of the map of used parameters
        self.salvage: Salvage | None = None
        self.label = ""

    @never_compiled
    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce torch's map of used parameters over all groups, in place.

        An entry becomes 1 if any rank whose gradients are averaged in this step has used the parameter, or else 0.
        """
        [used] = tensors
        here = used.bool()
        if self.salvage is not None:
            self.salvage.keep_used(used.float(), self._map)
        _at_the_end(lambda: self._forget(here & ~used.bool()))  # torch queues its own callback when this returns
        marked = _reduce(self.agent, used.float(), self._map).then(lambda mean: [used.copy_(mean.value() > 0)])
        return c10d._create_work_from_future(marked)  # pyright: ignore[reportAttributeAccessIssue]

    def contribute_zeros(self) -> None:
        here = torch.zeros(len(self.parameters), dtype=torch.float32, device=self.parameters[0].device)  # as in the map
        self._forget(self.agent.all_reduce(here, name=self._map).result() == 0)

    @property
    def _map(self) -> str:
        return f"{self.label}, used parameters"

    def _forget(self, uncounted: Tensor) -> None:
        """Remove the gradients of the parameters that are marked in `uncounted`.

        These parameters were used only by ranks whose gradients are not averaged in this step, such as those of a
        healing group, so other groups have no gradients for them. If the step has failed, do nothing, because a
        GradScaler raises an error if there are no gradients.
        """
        if self.agent.has_failed:
            return
        for parameter, is_uncounted in zip(self.parameters, uncounted.tolist(), strict=True):
            if is_uncounted:
                parameter.grad = None


def _name_in(model: torch.nn.Module, module: torch.nn.Module) -> str:
    """Return the name of `module` inside `model`, or else its class name. Compilation does not change the name."""
    module, model = (getattr(each, "_orig_mod", each) for each in (module, model))
    found = next((name for name, part in model.named_modules() if part is module), "")
    return found or type(module).__name__


class _Mark:
    """Marker attached to an autograd node. Once a weak reference to it is dead, the graph has been freed."""

    is_skipped = False
    """True if zeros were reduced in place of the gradients of this pass."""

    @never_compiled
    def refuse_skipped(self, *_: object) -> None:
        if self.is_skipped:
            raise ConfigurationError(
                "this backward pass is for a batch that was skipped, so its gradients would not be averaged: draw the "
                "next batch after optimizer.step(), not between the forward and the backward pass, and run no backward "
                "pass after agent.skip_batch()"
            )


@dataclass(slots=True)
class _Reduction:
    agent: Agent
    salvage: Salvage | None
    module: str
    parameters: list[torch.nn.Parameter]
    buckets: int | None = None
    """Number of buckets that the current backward pass has reduced, or None if no pass is running."""
    is_expected: bool = False
    """True if torch will reduce in the next backward pass. A forward pass sets this, even if no backward pass
    follows."""
    pass_order: PassOrder = field(default_factory=PassOrder)
    passes: "list[weakref.ref[_Mark]]" = field(default_factory=list)
    """Forward passes whose backward pass has not run. A reference is dead once the graph of the pass is freed."""
    _layout: list[Part] = field(default_factory=list[Part])
    _completed_in: int = -1
    """Value of `StepMachine.ended` when a backward pass last reduced all gradients."""
    _unaveraged: tuple[int, int] | None = None
    """Values of `StepMachine.ended` and `reductions` when a later pass of the same step changed the gradients."""

    def keep_layout(self, buckets: Sequence[GradBucket]) -> None:
        self._layout = [Part(self.bucket_name(b.index()), b.buffer().numel(), b.buffer().dtype) for b in buckets]

    def bucket_name(self, bucket: int) -> str:
        return f"{self.module}, bucket {bucket}"

    def following(self, bucket: int) -> list[Part]:
        return self._layout[bucket + 1 :]

    def completed(self) -> None:
        self.pass_order.record_reduction()
        self._completed_in, self._unaveraged = self.agent.internals.machine.ended, None
        if self.salvage is not None:
            self.salvage.mark_end()
        self.reset()

    @never_compiled
    def begin_pass(self, *_: object) -> None:
        """Check a backward pass that begins after another one has reduced the gradients of the step.

        torch reduces in a single backward pass after each forward pass. Any other one only adds to the mean, for
        example a second pass through the same graph. A script may still average the result itself before it votes.
        """
        machine = self.agent.internals.machine
        if self._completed_in != machine.ended:
            return
        if not self.is_expected:
            before = self._versions()
            _at_the_end(lambda: self._compare_versions(before))
        elif machine.world_size.mode is WorldSizeMode.CONSTANT_BATCH:
            gradients = (parameter.grad for parameter in self.parameters)
            if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
                raise ConfigurationError(SUMMED_TWICE)

    def refuse_unaveraged(self) -> None:
        machine = self.agent.internals.machine
        if self._unaveraged == (machine.ended, machine.reductions):
            raise ConfigurationError(PASS_AFTER_REDUCTION)

    def _compare_versions(self, before: list[tuple[int, int]]) -> None:
        if self._versions() != before:
            machine = self.agent.internals.machine
            self._unaveraged = machine.ended, machine.reductions

    def _versions(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self.parameters)
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def reset(self) -> None:
        self.buckets, self.is_expected = None, False
        self.passes.clear()


@never_compiled
def _reduce_bucket(reduction: _Reduction, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    name, rest = reduction.bucket_name(bucket.index()), reduction.following(bucket.index())
    internals = reduction.agent.internals
    internals.begin_backward()
    _at_the_end(internals.end_backward)
    reduction.buckets = bucket.index() + 1
    if bucket.is_last():
        _at_the_end(reduction.completed)
    if reduction.salvage is not None:
        internals.begin_step(has_computed=True)  # the kept buckets belong to this step
        reduction.salvage.keep_bucket(bucket, name, rest)
    reduced = _reduce(reduction.agent, bucket.buffer(), name, rest)
    if bucket.is_last():
        internals.progress.enter_reduction()
    return reduced


def _at_the_end(act: Callable[[], None]) -> None:
    """Call `act` at the end of the current backward pass if it succeeds, after the callbacks queued so far."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(lambda: engine.queue_callback(act))


def _reduce(agent: Agent, tensor: Tensor, name: str, rest: Sequence[Part] = ()) -> torch.futures.Future[Tensor]:
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()

    def pass_on(done: Future[Tensor]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            reduced.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            reduced.set_result(done.result())

    agent.all_reduce(tensor, name=name, followed_by=rest).add_done_callback(pass_on)
    return reduced
