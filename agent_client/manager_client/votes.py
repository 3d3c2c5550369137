"""A rank's votes on their way over its watch: a message on a stream costs half of a call."""

import itertools
import queue
import threading
import time
from dataclasses import dataclass, field

from lighthouse_protocol.messages.membership import Decision
from lighthouse_protocol.messages.session import Vote, VoteAnswer
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.stream_kinds import Watch


@dataclass(slots=True)
class PendingVote:
    """A vote that has no answer yet."""

    step: int
    vote: bool
    quorum_id: int | None
    ends_at: float
    number: int = 0
    """Of its last transmission; 0: it was not sent."""
    outcome: "queue.SimpleQueue[Decision | LighthouseError]" = field(default_factory=queue.SimpleQueue)
    """The answer to its last transmission."""

    @property
    def left_s(self) -> float:
        return max(0.001, self.ends_at - time.monotonic())


class VoteChannel:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._numbers = itertools.count(1)
        self._under_way: dict[int, PendingVote] = {}

    def open(self, watch: Watch) -> None:
        """From now on votes go over it."""
        with self._lock:
            self._watch = watch

    def end(self, error: LighthouseError) -> None:
        """The watch has ended, and what was under way with it."""
        with self._lock:
            self._watch = None
            ended, self._under_way = self._under_way, {}
        for vote in ended.values():
            vote.outcome.put(error)

    def send(self, vote: PendingVote, *, wants_next: bool) -> None:
        """Send it, or send it again. Without an open watch its outcome is Unreachable."""
        vote.number, vote.outcome = next(self._numbers), queue.SimpleQueue()
        with self._lock:
            watch = self._watch
            if watch is None:
                vote.outcome.put(Unreachable("the watch stream to the manager ended"))
                return
            self._under_way[vote.number] = vote
        watch.send(Vote(vote.number, vote.step, vote.vote, vote.quorum_id, wants_next, vote.left_s))

    def take(self, counted: VoteAnswer) -> None:
        if (vote := self._under_way.pop(counted.number, None)) is not None:  # else it came too late
            vote.outcome.put(counted.outcome)

    def result(self, vote: PendingVote, timeout_s: float) -> Decision:
        """Raises what the manager refused it with, why the watch has ended, or DeadlinePassed."""
        try:
            outcome = vote.outcome.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlinePassed(f"the manager did not answer a vote within {timeout_s:g} s") from None
        finally:
            self._under_way.pop(vote.number, None)
        if isinstance(outcome, LighthouseError):
            raise outcome
        return outcome
