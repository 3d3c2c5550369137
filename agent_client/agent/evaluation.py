"""One rank evaluates between two steps, and all ranks receive the result.

Rank 0 evaluates: group rank 0 of the first replica group of the last quorum that holds the state of the step. If the
state is sharded, all ranks of that group do, since the forward pass of one alone would hang in its first all-gather.
The others are in a declared wait, and not suspected, for as long as rank 0 moves.
"""

import io
import json
import logging
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from agent_client.agent.equality import check_same
from agent_client.agent.rank_round import RankRound, RankRounds
from agent_client.agent.rules.step import StepMachine
from agent_client.collectives.all_gather import MAX_BYTES
from agent_client.errors import ConfigurationError, EvaluationFailed
from agent_client.progress.progress import Progress
from agent_client.state.decoding import decode, encode
from agent_client.state.train_state import TrainState

log = logging.getLogger(__name__)

T = TypeVar("T")

RESULT, ERROR = b"+", b"-"
OPERATION = "evaluate_on_rank0"


class Evaluation:
    """`holds_state` tells whether this rank holds the state of the machine's step."""

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
        """As Agent.evaluate_on_rank0."""
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
        """The replica_rank of the first replica group that holds the newest state. All ranks find the same."""
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
        """(what the other ranks receive, what is raised here after that)"""
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
    """`brought` by the ranks of the group `first`, in their order."""
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
