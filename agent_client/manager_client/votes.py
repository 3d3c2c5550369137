"""A rank's votes on their way over its watch: a message on a stream costs half of a call."""

import itertools
import queue
import threading
import time
from dataclasses import dataclass

from lighthouse_protocol.messages.membership import Vote
from lighthouse_protocol.messages.session import Ballot, Counted
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError
from lighthouse_runtime.client.streams import Watch


@dataclass(frozen=True, slots=True)
class Said:
    """A vote that has no answer yet."""

    step: int
    vote: bool
    quorum_id: int | None
    ends_at: float

    @property
    def left_s(self) -> float:
        return max(0.001, self.ends_at - time.monotonic())


@dataclass(frozen=True, slots=True)
class Cast:
    """`outcome` has what came back, when it has come."""

    number: int
    outcome: "queue.SimpleQueue[Vote | LighthouseError]"


class VoteChannel:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._numbers = itertools.count(1)
        self._under_way: dict[int, Cast] = {}

    def open(self, watch: Watch) -> None:
        """From now on votes go over it."""
        with self._lock:
            self._watch = watch

    def end(self, error: LighthouseError) -> None:
        """The watch has ended, and what was under way with it."""
        with self._lock:
            self._watch = None
            ended, self._under_way = self._under_way, {}
        for cast in ended.values():
            cast.outcome.put(error)

    def cast(self, said: Said, *, wants_next: bool) -> Cast | None:
        """None: no watch is open."""
        cast = Cast(next(self._numbers), queue.SimpleQueue())
        with self._lock:
            watch = self._watch
            if watch is None:
                return None
            self._under_way[cast.number] = cast
        watch.send(Ballot(cast.number, said.step, said.vote, said.quorum_id, wants_next, said.left_s))
        return cast

    def take(self, counted: Counted) -> None:
        if (cast := self._under_way.pop(counted.number, None)) is not None:  # else it came too late
            cast.outcome.put(counted.outcome)

    def result(self, cast: Cast, timeout_s: float) -> Vote:
        """Raises what the manager refused it with, why the watch has ended, or DeadlinePassed."""
        try:
            outcome = cast.outcome.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlinePassed(f"the manager gave no answer to a vote within {timeout_s:g} s") from None
        finally:
            self._under_way.pop(cast.number, None)
        if isinstance(outcome, LighthouseError):
            raise outcome
        return outcome
