"""Exchanges among all ranks in a quorum between two steps: evaluation on rank 0, and comparison of values.

Rank 0 is group rank 0 of the first replica group in the last quorum that holds the newest state. If the state is
sharded, all ranks in that group evaluate, because a single rank would hang in the first all-gather of its forward pass.
The other ranks declare that they are waiting, so they are not considered hung as long as rank 0 makes progress.
"""

import contextlib
import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from agent_client.errors import (
    AgentError,
    ConfigurationError,
    EvaluationFailed,
    EvaluationInterrupted,
    RankMismatch,
    first_line,
)
from agent_client.state.codec import decode, encode
from agent_client.state.tree import CorruptState
from agent_client.step.internals import Internals
from agent_client.step.rules.comparison import Announced, Kind
from agent_client.step.rules.machine import Phase
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.rules.quorum_change import list_names

log = logging.getLogger(__name__)

T = TypeVar("T")

Sum = Callable[[torch.Tensor], object]
"""Function that sums a tensor over all ranks, in place, and raises RuntimeError if a rank is lost."""

MAX_BYTES = 2**30


def gather(total: Sum, place: int, size: int, own: bytes) -> list[bytes]:
    """Exchange bytes among `size` ranks. Return the bytes of every rank, by index.

    `total` sums a tensor over the ranks, `place` is the index of this rank, and `own` contains its bytes. The exchange
    uses only sums, in which each rank fills its own part of a tensor, because every kind of process group supports
    sums. A rank that has finished may exit and close its connections while another rank is still reading from them, so
    a final sum confirms that all ranks have received everything. If only that sum fails, another rank has already
    exited, which is not an error.

    Raises:
        RuntimeError: `total` failed, or the sizes add up to more than MAX_BYTES, which may happen if the other ranks
            are running a different sum.
    """
    if size == 1:
        return [own]
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[place] = len(own)
    total(lengths)
    ends: list[int] = lengths.cumsum(0).tolist()
    if not 0 <= ends[-1] <= MAX_BYTES or bool((lengths < 0).any()):
        raise RuntimeError(f"the ranks send {ends[-1]} bytes, more than {MAX_BYTES}; or some of them are missing")
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = ends[place] - len(own)
    if own:
        everything[begin : ends[place]] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    if ends[-1]:
        total(everything)
    with contextlib.suppress(RuntimeError):
        total(torch.zeros(1))
    view = everything.numpy().tobytes()
    return [view[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


class RankRound:
    """Runs exchanges among all ranks in the last quorum. In each, every rank receives the bytes of all ranks."""

    def __init__(self, internals: Internals, what: str, within_s: float, *, may_begin: bool = False) -> None:
        """Prepare the exchanges. `what` names them in errors, and `within_s` is the time limit for each.

        Raises:
            EvaluationInterrupted: There is no quorum, or the step has failed.
            AgentError: A step is in progress. With `may_begin`, this is not an error in the first step.
        """
        assignment, machine, place = internals.runner.last, internals.machine, internals.place
        if assignment is None or (machine.failure is not None and machine.phase is not Phase.IDLE):
            raise EvaluationInterrupted(f"{what}: there is no quorum: {machine.failure or 'do it after a step'}")
        if machine.phase is not Phase.IDLE and not (may_begin and machine.ended == 0):
            raise AgentError(f"{what}: a step is under way; call it between two steps, after the optimizer's step")
        if machine.phase is not Phase.IDLE and assignment.max_step > 0:
            # A resumed group cannot know whether the other groups have also just resumed or are already training.
            log.info("%s: compared inside this group only, because other replica groups may train already", what)
            assignment = replace(assignment, replica_rank=0, replica_world_size=1, replica_ids=())
        self._internals = internals
        self._what = what
        self._within_s = within_s
        self.assignment = assignment
        self.own_name = self.rank_name(assignment.replica_rank, place.group_rank)

    def rank_name(self, replica_rank: int, group_rank: int) -> RankName:
        has_several = self.assignment.replica_world_size > 1
        return RankName(self.assignment.replica_ids[replica_rank] if has_several else "", group_rank)

    def texts_by_name(self, received: Sequence[Sequence[bytes]]) -> dict[RankName, str]:
        return {
            self.rank_name(replica_rank, group_rank): text.decode(errors="replace")
            for replica_rank, of_ranks in enumerate(received)
            for group_rank, text in enumerate(of_ranks)
        }

    def gather(self, own: bytes, operation: str, *, waits_for: str = "") -> list[list[bytes]]:
        """Send `own` to all ranks. Return the bytes of all ranks as [replica_rank][group_rank].

        Meanwhile, `lighthouse ranks` shows a wait for `waits_for` if that is given, or else the collective `operation`.

        Raises:
            EvaluationInterrupted: A rank was lost or does not take part. Either all ranks in a group raise this or none
                does. The next step requests another quorum.
        """
        progress, has_others = self._internals.progress, self.assignment.replica_world_size > 1
        entry = progress.numbers.inside()
        with (
            progress.waiting_for(waits_for)
            if waits_for
            else self._internals.runner.collective(entry, operation, within_group=not has_others)
        ):
            try:
                return self._internals.thread.submit(lambda: self._exchange(own, operation)).result()
            except EvaluationInterrupted as e:
                self._internals.machine.record_loss_between_steps(str(e))
                raise EvaluationInterrupted(f"{self._what}: {e}") from e

    # -- on the Agent's background thread

    def _exchange(self, own: bytes, operation: str) -> list[list[bytes]]:
        own_of_all, error = self._over_groups(own, operation)
        received = self._within_group({"error": error, "of": own_of_all})
        if errors := [each["error"] for each in received if each["error"]]:
            raise EvaluationInterrupted(errors[0])
        return [list(of_ranks) for of_ranks in zip(*(each["of"] for each in received), strict=True)]

    def _over_groups(self, own: bytes, operation: str) -> tuple[list[bytes], str]:
        comparison, peers = self._internals.runner.comparison, self._internals.peers
        place, size = self.assignment.replica_rank, self.assignment.replica_world_size
        announced = Announced(Kind.GATHER, name=operation)
        is_compared = comparison.is_on and size > 1  # finds participants that are about to reduce instead
        if is_compared and comparison.exchange(announced, self._within_s) is None:
            return [], self._internals.machine.failure or "the other participants do something else"
        try:
            return gather(lambda tensor: peers.all_reduce(tensor, self._within_s), place, size, own), ""
        except RuntimeError as e:
            peers.drop()
            return [], f"the connections to the other replica groups ended: {first_line(e)}"

    def _within_group(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        place = self._internals.place
        if (group := place.group) is None:
            return [own]
        try:
            content = b"".join(encode(own))
            received = gather(lambda x: group.all_reduce(x, self._within_s), place.group_rank, group.size, content)
            return [decode(each) for each in received]
        except (RuntimeError, CorruptState) as e:
            self._internals.peers.drop()
            raise EvaluationInterrupted(f"the connections inside the replica group ended: {first_line(e)}") from e


MAX_VALUE_CHARS = 1000


def check_equal(internals: Internals, what: str, value: object, within_s: float) -> None:
    text = f"{what} = {value!r}"
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigurationError(f"check_equal: {what} has {len(text)} characters; compare a hash of it")
    internals.wait_first_quorum()
    opened = RankRound(internals, what, within_s, may_begin=True)
    check_same(opened.texts_by_name(opened.gather(text.encode(errors="backslashreplace"), "check_equal")))


def check_same(texts: Mapping[RankName, str]) -> None:
    """Raise RankMismatch if the ranks' texts differ. The message lists the rarest text first."""
    parties: dict[str, list[RankName]] = {}
    for name, text in texts.items():
        parties.setdefault(text, []).append(name)
    if len(parties) > 1:
        by_size = sorted(parties.items(), key=lambda party: len(party[1]))
        raise RankMismatch("ranks differ: " + "; ".join(f"{text} at {list_names(names)}" for text, names in by_size))


RESULT, ERROR = b"+", b"-"
OPERATION = "evaluate_on_rank0"


def evaluate_on_rank0(
    internals: Internals, evaluate: Callable[[], T], what: str, whole_group: bool | None, within_s: float
) -> T:
    has_shards = internals.state.has_shards
    if has_shards and whole_group is False:
        raise ConfigurationError(
            "whole_group=False: the state is sharded over the ranks of the group, and rank 0 alone would wait for "
            "the others' shards without end; leave it out"
        )
    opened = RankRound(internals, what, within_s)
    _log(opened, "starting %s", what)
    first = _find_first(internals, opened, what)
    error: Exception | None = None
    if opened.assignment.replica_rank == first and (has_shards or whole_group or opened.own_name.group_rank == 0):
        payload, error = _run(internals, opened, evaluate, what)
        received = opened.gather(payload, OPERATION)
    else:
        name = opened.rank_name(first, 0)
        _log(opened, "skipping %s (only rank %s evaluates)", what, name)
        _log(opened, "waiting for %s metrics from rank %s", what, name)
        received = opened.gather(b"", OPERATION, waits_for=f"rank {name} {what}")
    if error is not None:
        raise error
    return _outcome(opened, received[first], first, what)


def _find_first(internals: Internals, opened: RankRound, what: str) -> int:
    """Return the replica_rank of the first group that holds the newest state. All ranks return the same number."""
    own = json.dumps([OPERATION, what, internals.machine.step, internals.has_state])
    received = opened.gather(own.encode(), OPERATION)
    places: list[tuple[bool, int]] = []
    for of_ranks in received:
        match _parse(of_ranks[0]):
            case [str(operation), str(theirs), int(step), bool(holds)] if (operation, theirs) == (OPERATION, what):
                places.append((holds, step))
            case _:
                check_same(opened.texts_by_name(received))
    return places.index(max(places))


def _run(
    internals: Internals, opened: RankRound, evaluate: Callable[[], object], what: str
) -> tuple[bytes, Exception | None]:
    """Call `evaluate`. Return the bytes to send to the other ranks, and the exception to raise afterwards, or None."""
    try:
        with internals.progress.phase(what):
            result = evaluate()
        payload = RESULT + b"".join(encode(result))
        if len(payload) > MAX_BYTES // 2:
            raise ValueError(f"the result has {len(payload)} bytes; at most {MAX_BYTES // 2} fit")
    except Exception as e:  # noqa: BLE001  sent to all ranks
        return ERROR + f"{type(e).__name__}: {e}".encode(errors="backslashreplace"), e
    _log(opened, "%s metrics: %s", what, reprlib.repr(result))
    _log(opened, "broadcasting %s metrics to the other ranks", what)
    return payload, None


def _outcome(opened: RankRound, received: list[bytes], first: int, what: str) -> Any:
    """Return the result that rank 0 of group `first` has sent.

    `received` contains what each rank in that group has sent. Raise EvaluationFailed if any of them has sent an error.
    """
    for group_rank, payload in enumerate(received):
        if payload.startswith(ERROR):
            text = payload[len(ERROR) :].decode(errors="replace")
            raise EvaluationFailed(f"{what} on rank {opened.rank_name(first, group_rank)} has failed: {text}")
    encoded = received[0].removeprefix(RESULT)
    result = decode(encoded)
    if opened.own_name != opened.rank_name(first, 0):
        _log(opened, "received %s metrics: %s", what, reprlib.repr(result))
    _log(opened, "%s completed: %s", what, reprlib.repr(result))
    return result


def _log(opened: RankRound, text: str, *values: object) -> None:
    log.info(f"[rank %s] {text}", opened.own_name, *values)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
