"""What all ranks do together between two steps, and not by a sum of gradients: one evaluates, and all learn the result;
or all say a number, and learn whether it is the same.

Rank 0 evaluates: group rank 0 of the first replica group of the last quorum that holds the state of the step. Where the
state is sharded, all ranks of that group do, since the forward pass of one alone would hang in its first all-gather.
The others are in a declared wait, and not suspected, for as long as rank 0 moves.
"""

import io
import json
import logging
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent_client.agent.agent_view import AgentView
from agent_client.agent.background_thread import BackgroundThread
from agent_client.agent.rules.agreement import Announced, Kind
from agent_client.agent.rules.step import Phase
from agent_client.agent.step_runner import StepRunner
from agent_client.collectives.all_gather import MAX_BYTES, Gathering
from agent_client.collectives.gloo import GlooGroup
from agent_client.errors import AgentError, ConfigurationError, EvaluationFailed, EvaluationLost, RanksDiffer
from agent_client.state.decoding import decode, encode
from agent_client.state.train_state import TrainState
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.rules.rank_text import list_names

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_VALUE_CHARS = 1000
RESULT, ERROR = b"+", b"-"
OPERATION = "evaluate_on_rank0"


class AgentTogether(AgentView, ABC):
    """Of an Agent, which makes these parts."""

    state: TrainState
    group_rank: int
    group_world_size: int
    _thread: BackgroundThread
    _group: GlooGroup | None

    def evaluate_on_rank0(
        self,
        evaluate: Callable[[], T],
        *,
        what: str = "validation",
        whole_group: bool | None = None,
        within_s: float = 86400.0,
    ) -> T:
        """What `evaluate()` returns on rank 0, at all ranks: numbers, texts, tensors (they come on the CPU), and dicts,
        lists and tuples of these.

        For all ranks, between two steps: after the optimizer's, at certain numbers of `current_step`. `what` is its
        name in logs and in `lighthouse ranks`. `whole_group`: all ranks of that replica group evaluate; None: they do
        if the state is sharded. However long it takes, up to `within_s`, nobody is dropped.

        Raises, at all ranks: what `evaluate` has raised (at others than the rank it was: EvaluationFailed with its
        name and text); EvaluationLost if a rank was lost meanwhile: the next step finds the others.
        """
        whole = self.state.has_shards if whole_group is None else whole_group
        if self.state.has_shards and not whole:
            raise ConfigurationError(
                "whole_group=False: the state is sharded over the ranks of the group, and rank 0 alone would wait for "
                "the others' shards without end; leave it out"
            )
        return _Evaluation(self, self._circle(what, within_s), what, whole_group=whole).run(evaluate)

    def check_equal(self, what: str, value: object, *, within_s: float = 600.0) -> None:
        """Raises RanksDiffer at all ranks unless all have the same `value` (a number, a text: what repr() shows).

        For all ranks, before their first step or between two. A rank that joins others that have trained already is
        compared with those of its own replica group: the others are in their steps.
        """
        said = f"{what} = {value!r}"
        if len(said) > MAX_VALUE_CHARS:
            raise ConfigurationError(f"check_equal: {what} has {len(said)} characters; compare a hash of it")
        if self._runner.last is None:
            self.start_quorum()
            self.wait_quorum()
        circle = self._circle(what, within_s, may_begin=True)
        told = circle.bring(said.encode(), "check_equal")
        _check_same(circle.named(told))

    @abstractmethod
    def start_quorum(self) -> None: ...

    @abstractmethod
    def wait_quorum(self) -> None: ...

    def _circle(self, what: str, within_s: float, *, may_begin: bool = False) -> "_Circle":
        """`may_begin`: also in the first step, before it has summed anything."""
        assignment, machine = self._runner.last, self._machine
        if assignment is None or (machine.failure is not None and machine.phase is not Phase.IDLE):
            raise EvaluationLost(f"{what}: there is no quorum: {machine.failure or 'do it after a step'}")
        if machine.phase is not Phase.IDLE and not (may_begin and machine.ended == 0):
            raise AgentError(f"{what}: a step is under way; do it between two steps, after the optimizer's")
        if machine.phase is not Phase.IDLE and assignment.heals and assignment.max_step > 0:
            log.info("%s: the other replica groups have trained already; compared inside this group", what)
            assignment = replace(assignment, replica_rank=0, replica_world_size=1, replica_ids=())
        parts = (self._peers, self._group, self.group_rank)
        return _Circle(what, Gathering(assignment, *parts, within_s=within_s), self._runner, self._thread)


class _Circle:
    """The ranks of a quorum, at a moment at which all do the same."""

    def __init__(self, what: str, gathering: Gathering, runner: StepRunner, thread: BackgroundThread) -> None:
        self._what = what
        self.assignment = gathering.assignment
        self._gathering = gathering
        self._runner = runner
        self._thread = thread

    def name(self, replica_rank: int, group_rank: int) -> RankName:
        has_several = self.assignment.replica_world_size > 1
        return RankName(self.assignment.replica_ids[replica_rank] if has_several else "", group_rank)

    def named(self, told: Sequence[Sequence[bytes]]) -> dict[RankName, str]:
        return {
            self.name(replica_rank, group_rank): text.decode(errors="replace")
            for replica_rank, of_ranks in enumerate(told)
            for group_rank, text in enumerate(of_ranks)
        }

    def bring(self, mine: bytes, operation: str, *, waits_for: str = "") -> list[list[bytes]]:
        """What all have brought, by replica_rank and group rank. Raises EvaluationLost, and then the next step asks for
        another quorum.

        Meanwhile this rank is in `operation`, or in a declared wait."""
        runner, has_others = self._runner, self.assignment.replica_world_size > 1
        entry = runner.progress.numbers.inside()
        with (
            runner.progress.waiting_for(waits_for)
            if waits_for
            else runner.inside(entry, operation, within_group=not has_others)
        ):
            try:
                return self._thread.submit(lambda: self._bring(mine, operation)).result()
            except EvaluationLost as e:
                runner.machine.lost_between(str(e))
                raise EvaluationLost(f"{self._what}: {e}") from e

    def _bring(self, mine: bytes, operation: str) -> list[list[bytes]]:
        """In the first step under a quorum others may be about to sum something."""
        runner = self._runner
        has_others = self.assignment.replica_world_size > 1
        announced = Announced(Kind.GATHER, name=operation)
        if runner.compares and has_others and not runner.agree(announced, self._gathering.within_s):
            raise EvaluationLost(runner.machine.failure or "the other participants do something else")
        return self._gathering.bring(mine)


class _Evaluation:
    def __init__(self, agent: AgentTogether, circle: _Circle, what: str, *, whole_group: bool) -> None:
        self._agent = agent
        self._circle = circle
        self._what = what
        self._whole_group = whole_group
        self._me = circle.name(circle.assignment.replica_rank, agent.group_rank)

    def run(self, evaluate: Callable[[], Any]) -> Any:
        circle, agent = self._circle, self._agent
        self._say("starting %s", self._what)
        first = self._first()
        error: Exception | None = None
        if circle.assignment.replica_rank == first and (self._whole_group or agent.group_rank == 0):
            payload, error = self._evaluate(evaluate)
            told = circle.bring(payload, OPERATION)
        else:
            self._say("skipping %s (only rank %s evaluates)", self._what, circle.name(first, 0))
            self._say("waiting for %s metrics from rank %s", self._what, circle.name(first, 0))
            told = circle.bring(b"", OPERATION, waits_for=f"rank {circle.name(first, 0)} {self._what}")
        if error is not None:
            raise error
        return self._outcome(told[first], first)

    def _first(self) -> int:
        """The first replica group that holds the newest state. All ranks learn the same of each other."""
        own = json.dumps([OPERATION, self._what, self._agent.current_step, self._agent.holds_state])
        told = self._circle.bring(own.encode(), OPERATION)
        places: list[tuple[int, bool]] = []
        for of_ranks in told:
            match _parsed(of_ranks[0]):
                case [str(operation), str(what), int(step), bool(holds)] if (operation, what) == (
                    OPERATION,
                    self._what,
                ):
                    places.append((step, holds))
                case _:
                    _check_same(self._circle.named(told))
        return places.index(max(places, key=lambda place: (place[1], place[0])))

    def _evaluate(self, evaluate: Callable[[], Any]) -> tuple[bytes, Exception | None]:
        """What is to be told to the others, and what is to be raised here after that."""
        try:
            with self._agent.phase(self._what):
                result = evaluate()
            payload = RESULT + b"".join(encode(result))
            if len(payload) > MAX_BYTES // 2:
                raise ValueError(f"the result has {len(payload)} bytes; at most {MAX_BYTES // 2} are told to all ranks")
        except Exception as e:  # noqa: BLE001  it belongs to all ranks
            return ERROR + f"{type(e).__name__}: {e}".encode(), e
        self._say("%s metrics: %s", self._what, reprlib.repr(result))
        self._say("broadcasting %s metrics to the other ranks", self._what)
        return payload, None

    def _outcome(self, told: list[bytes], first: int) -> Any:
        for group_rank, payload in enumerate(told):
            if payload.startswith(ERROR):
                text = payload[len(ERROR) :].decode(errors="replace")
                raise EvaluationFailed(
                    f"{self._what} on rank {self._circle.name(first, group_rank)} has failed: {text}"
                )
        encoded = told[0].removeprefix(RESULT)
        result = decode(io.BytesIO(encoded), len(encoded))
        if self._me != self._circle.name(first, 0):
            self._say("received %s metrics: %s", self._what, reprlib.repr(result))
        self._say("%s completed: %s", self._what, reprlib.repr(result))
        return result

    def _say(self, text: str, *values: object) -> None:
        log.info(f"[rank %s] {text}", self._me, *values)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _check_same(said: Mapping[RankName, str]) -> None:
    """Raises RanksDiffer."""
    parties: dict[str, list[RankName]] = {}
    for name, text in said.items():
        parties.setdefault(text, []).append(name)
    if len(parties) > 1:
        by_size = sorted(parties.items(), key=lambda party: len(party[1]))
        raise RanksDiffer("ranks differ: " + "; ".join(f"{text} at {list_names(names)}" for text, names in by_size))
