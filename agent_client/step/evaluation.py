"""Exchanges between all ranks of a quorum between two steps: evaluation on rank 0, and comparison of values.

`Evaluation` runs a function on rank 0 and sends the result to all ranks. Rank 0 is group rank 0 of the first replica
group of the last quorum that holds the state of the step. If the state is sharded, all ranks of that group evaluate,
because the forward pass of a single rank would hang in its first all-gather. The other ranks are in a declared wait, so
they are not suspected of a hang as long as rank 0 makes progress.

`check_equal` compares a value that must be the same at all ranks.
"""

import io
import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent_client.collectives.all_gather import MAX_BYTES, AllGather
from agent_client.collectives.gloo import GlooGroup
from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ConfigurationError, EvaluationFailed, EvaluationInterrupted, RankMismatch
from agent_client.progress.progress import Progress
from agent_client.state.codec import decode, encode
from agent_client.state.train_state import TrainState
from agent_client.step.rules.comparison import Announced, Kind
from agent_client.step.rules.machine import Phase, StepMachine
from agent_client.step.runner import BackgroundThread, StepRunner
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.rules.quorum_change import list_names

log = logging.getLogger(__name__)


class RankRounds:
    """Opens rounds. In a round each rank of the last quorum sends bytes and receives those of all ranks."""

    def __init__(
        self, runner: StepRunner, thread: BackgroundThread, peers: Peers, group: GlooGroup | None, group_rank: int
    ) -> None:
        self.runner = runner
        self.thread = thread
        self._peers = peers
        self._group = group
        self.group_rank = group_rank

    def open(self, what: str, within_s: float, *, may_begin: bool = False) -> "RankRound":
        """Open a round.

        Args:
            what: Name for errors.
            within_s: Time limit of each exchange.
            may_begin: Whether to allow a round inside the first step, before it has reduced anything.

        Raises:
            EvaluationInterrupted: There is no quorum.
            AgentError: A step is in progress.
        """
        assignment, machine = self.runner.last, self.runner.machine
        if assignment is None or (machine.failure is not None and machine.phase is not Phase.IDLE):
            raise EvaluationInterrupted(f"{what}: there is no quorum: {machine.failure or 'do it after a step'}")
        if machine.phase is not Phase.IDLE and not (may_begin and machine.ended == 0):
            raise AgentError(f"{what}: a step is under way; call it between two steps, after the optimizer's step")
        if machine.phase is not Phase.IDLE and assignment.heals and assignment.max_step > 0:
            log.info("%s: compared inside this group only, because the other replica groups have trained already", what)
            assignment = replace(assignment, replica_rank=0, replica_world_size=1, replica_ids=())
        gathering = AllGather(assignment, self._peers, self._group, self.group_rank, within_s=within_s)
        return RankRound(what, gathering, self)


class RankRound:
    """One round. `own_name` is the name of this rank."""

    def __init__(self, what: str, gathering: AllGather, rounds: RankRounds) -> None:
        self._what = what
        self.assignment = gathering.assignment
        self._gathering = gathering
        self._rounds = rounds
        self.own_name = self.name(self.assignment.replica_rank, rounds.group_rank)

    def name(self, replica_rank: int, group_rank: int) -> RankName:
        has_several = self.assignment.replica_world_size > 1
        return RankName(self.assignment.replica_ids[replica_rank] if has_several else "", group_rank)

    def named(self, brought: Sequence[Sequence[bytes]]) -> dict[RankName, str]:
        return {
            self.name(replica_rank, group_rank): text.decode(errors="replace")
            for replica_rank, of_ranks in enumerate(brought)
            for group_rank, text in enumerate(of_ranks)
        }

    def gather(self, own: bytes, operation: str, *, waits_for: str = "") -> list[list[bytes]]:
        """Exchange bytes with all ranks.

        Args:
            own: Bytes of this rank.
            operation: Name of the collective in which this rank is meanwhile.
            waits_for: Name of a declared wait in which this rank is instead.

        Returns:
            The bytes by replica_rank and group rank.

        Raises:
            EvaluationInterrupted: A rank is lost. The next step requests another quorum.
        """
        runner, has_others = self._rounds.runner, self.assignment.replica_world_size > 1
        entry = runner.progress.numbers.inside()
        with (
            runner.progress.waiting_for(waits_for)
            if waits_for
            else runner.inside(entry, operation, within_group=not has_others)
        ):
            try:
                return self._rounds.thread.submit(lambda: self._gather(own, operation)).result()
            except EvaluationInterrupted as e:
                runner.machine.lost_between(str(e))
                raise EvaluationInterrupted(f"{self._what}: {e}") from e

    def _gather(self, own: bytes, operation: str) -> list[list[bytes]]:
        """Exchange on the Agent's thread, after comparing with participants that may be about to reduce."""
        runner = self._rounds.runner
        has_others = self.assignment.replica_world_size > 1

        def disagreement() -> str:
            announced = Announced(Kind.GATHER, name=operation)
            if not (runner.compares and has_others) or runner.agree(announced, self._gathering.within_s) is not None:
                return ""
            return runner.machine.failure or "the other participants do something else"

        return self._gathering.exchange(own, disagreement)


MAX_VALUE_CHARS = 1000


def check_equal(
    rounds: RankRounds, what: str, value: object, within_s: float, wait_first_quorum: Callable[[], None]
) -> None:
    """Implement Agent.check_equal. `wait_first_quorum` returns when the first quorum is known."""
    text = f"{what} = {value!r}"
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigurationError(f"check_equal: {what} has {len(text)} characters; compare a hash of it")
    wait_first_quorum()
    opened = rounds.open(what, within_s, may_begin=True)
    check_same(opened.named(opened.gather(text.encode(), "check_equal")))


def check_same(texts: Mapping[RankName, str]) -> None:
    """Compare the texts of all ranks.

    Raises:
        RankMismatch: They differ. The message lists the smallest party first.
    """
    parties: dict[str, list[RankName]] = {}
    for name, text in texts.items():
        parties.setdefault(text, []).append(name)
    if len(parties) > 1:
        by_size = sorted(parties.items(), key=lambda party: len(party[1]))
        raise RankMismatch("ranks differ: " + "; ".join(f"{text} at {list_names(names)}" for text, names in by_size))


T = TypeVar("T")

RESULT, ERROR = b"+", b"-"
OPERATION = "evaluate_on_rank0"


class Evaluation:
    """Evaluates on rank 0. `holds_state` returns whether this rank holds the state of the machine's step."""

    def __init__(
        self,
        rounds: RankRounds,
        state: TrainState,
        machine: StepMachine,
        progress: Progress,
        holds_state: Callable[[], bool],
    ) -> None:
        self._rounds = rounds
        self._state = state
        self._machine = machine
        self._progress = progress
        self._holds_state = holds_state

    def run(self, evaluate: Callable[[], T], what: str, whole_group: bool | None, within_s: float) -> T:
        """Implement Agent.evaluate_on_rank0."""
        whole = self._state.has_shards if whole_group is None else whole_group
        if self._state.has_shards and not whole:
            raise ConfigurationError(
                "whole_group=False: the state is sharded over the ranks of the group, and rank 0 alone would wait for "
                "the others' shards without end; leave it out"
            )
        opened = self._rounds.open(what, within_s)
        _say(opened, "starting %s", what)
        first = self._find_first(opened, what)
        error: Exception | None = None
        if opened.assignment.replica_rank == first and (whole or opened.own_name.group_rank == 0):
            payload, error = self._evaluate(opened, evaluate, what)
            brought = opened.gather(payload, OPERATION)
        else:
            name = opened.name(first, 0)
            _say(opened, "skipping %s (only rank %s evaluates)", what, name)
            _say(opened, "waiting for %s metrics from rank %s", what, name)
            brought = opened.gather(b"", OPERATION, waits_for=f"rank {name} {what}")
        if error is not None:
            raise error
        return _outcome(opened, brought[first], first, what)

    def _find_first(self, opened: RankRound, what: str) -> int:
        """Return the replica_rank of the first group with the newest state, which is the same at all ranks."""
        own = json.dumps([OPERATION, what, self._machine.step, self._holds_state()])
        brought = opened.gather(own.encode(), OPERATION)
        places: list[tuple[int, bool]] = []
        for of_ranks in brought:
            match _parsed(of_ranks[0]):
                case [str(operation), str(theirs), int(step), bool(holds)] if (operation, theirs) == (OPERATION, what):
                    places.append((step, holds))
                case _:
                    check_same(opened.named(brought))
        return places.index(max(places, key=lambda place: (place[1], place[0])))

    def _evaluate(self, opened: RankRound, evaluate: Callable[[], object], what: str) -> tuple[bytes, Exception | None]:
        """Return the bytes for the other ranks, and the exception to raise after they are sent."""
        try:
            with self._progress.phase(what):
                result = evaluate()
            payload = RESULT + b"".join(encode(result))
            if len(payload) > MAX_BYTES // 2:
                raise ValueError(f"the result has {len(payload)} bytes; at most {MAX_BYTES // 2} fit")
        except Exception as e:  # noqa: BLE001  it belongs to all ranks
            return ERROR + f"{type(e).__name__}: {e}".encode(), e
        _say(opened, "%s metrics: %s", what, reprlib.repr(result))
        _say(opened, "broadcasting %s metrics to the other ranks", what)
        return payload, None


def _outcome(opened: RankRound, brought: list[bytes], first: int, what: str) -> Any:
    """Return the result, or raise the error, from what the ranks of group `first` have sent."""
    for group_rank, payload in enumerate(brought):
        if payload.startswith(ERROR):
            text = payload[len(ERROR) :].decode(errors="replace")
            raise EvaluationFailed(f"{what} on rank {opened.name(first, group_rank)} has failed: {text}")
    encoded = brought[0].removeprefix(RESULT)
    result = decode(io.BytesIO(encoded), len(encoded))
    if opened.own_name != opened.name(first, 0):
        _say(opened, "received %s metrics: %s", what, reprlib.repr(result))
    _say(opened, "%s completed: %s", what, reprlib.repr(result))
    return result


def _say(opened: RankRound, text: str, *values: object) -> None:
    log.info(f"[rank %s] {text}", opened.own_name, *values)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
