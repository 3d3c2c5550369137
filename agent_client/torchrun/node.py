"""A node of a torchrun job, as a rank of an elastic run.

`Node` drives the state machine of a rank, in which torchrun's rounds are generations. It joins rounds, and detects when
the current round has ended. `RoundStore` wraps the store of a round so that waits for keys stop when the round ends.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from agent_client.restart.driver import Stream
from agent_client.restart.rank_thread import DriverThread
from agent_client.restart.rules import events
from agent_client.restart.rules.events import RankConfig, RankPhase
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import GenerationEnded, RankHello, RunCompleted, RunStopped, ToRunRank
from lighthouse_protocol.refusals import LighthouseError

WAITS_FOR_S = 0.25  # poll interval of `join`, which extends its limit while the node is a spare
_SLICES = 40
NEVER_S = 1e9

Outcome = RunCompleted | RunStopped | LighthouseError


class Node(DriverThread):
    """Connection of a torchrun node to its run at the lighthouse. All methods are thread-safe."""

    def __init__(self, entry: RankHello, limit_s: float, open_stream: Callable[[], Stream]) -> None:
        """Set the parameters. Call start() to connect.

        `entry` is the first message to the lighthouse. While the node is waiting for a round, the lighthouse may be
        unreachable for `limit_s` seconds.
        """
        # torchrun stops the workers, so the machine must never kill this process.
        config = RankConfig(lighthouse_timeout_s=limit_s, hard_timeout_s=NEVER_S)
        super().__init__(RankMachine(entry, config), open_stream)
        self._changed = threading.Condition()
        self._round: events.Run | None = None
        self._is_over = False
        self._has_finished = False
        self._failure = -1
        self.outcome: Outcome | None = None
        """How the run has ended for this node, or None if there may be another round."""
        self._has_left = False

    def leave(self) -> None:
        """Leave the run, so that the other nodes do not wait for this node. A waiting join() returns None."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()
        super().leave()

    # -- state

    @property
    def is_spare(self) -> bool:
        return self.machine.phase is RankPhase.SPARE

    @property
    def is_in_round(self) -> bool:
        return self._round is not None

    @property
    def is_over(self) -> bool:
        """True if the run has ended, or the current round has ended because a node was lost, failed or wants to join.

        After finish(), the completion of the run or the loss of the lighthouse does not make this True, so that the
        other nodes can finish, too.
        """
        if self._has_finished and isinstance(self.outcome, RunCompleted):
            return False
        is_cut_off = self._has_finished and isinstance(self.outcome, LighthouseError)
        return self._is_over or (self.outcome is not None and not is_cut_off)

    def is_over_within(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds until the round has ended. Return whether it has.

        The wait is divided into many short waits, so that a suspension of the host does not use up the whole limit.
        """
        with self._changed:
            return any(self._changed.wait_for(lambda: self.is_over, limit_s / _SLICES) for _ in range(_SLICES))

    @property
    def is_over_by_failure(self) -> bool:
        return self._round is not None and self._failure >= self._round.number

    # -- requests

    def join(self, limit_s: float) -> events.Run | None:
        """Leave the current round, and wait for the next one that includes this node.

        A spare (a node beyond the maximum number of nodes) waits without limit.

        Returns:
            The round. None if none formed within `limit_s` seconds, the node has left, or the run has ended.
        """
        ends_at = time.monotonic() + limit_s
        with self._changed:
            before = -1 if self._round is None else self._round.number
            if self._round is not None and not self._is_over:
                self.put(events.Raised("its workers have failed, or were stopped"))
                self._is_over = True
            self.put(events.Waiting())
            while self.outcome is None and not self._has_left:
                newest, now = self._round, time.monotonic()
                if newest is not None and newest.number > before:
                    if not self._is_over:
                        return newest
                    before = newest.number
                    self.put(events.Waiting())
                if self.is_spare:
                    ends_at = now + limit_s
                if now >= ends_at:
                    return None
                self._changed.wait(min(WAITS_FOR_S, ends_at - now))
        return None

    def finish(self) -> None:
        self._has_finished = True
        self.put(events.Returned())

    def close(self, limit_s: float) -> bool:
        """End the run for all nodes. Return whether the lighthouse has confirmed this within `limit_s`."""
        self.put(events.Closing())
        with self._changed:
            return self._changed.wait_for(lambda: self.outcome is not None, limit_s)

    # -- called by the driver and the stream

    def run_generation(self, run: events.Run) -> None:
        with self._changed:
            self._round, self._is_over, self._has_finished = run, False, False
            self._changed.notify_all()

    def end_run(self, ended: events.Ended) -> None:
        with self._changed:
            self.outcome = ended.outcome
            self._changed.notify_all()

    def sample(self) -> ProgressSample | None:
        return None

    def interrupt(self, reason: str) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def kill(self, reason: str) -> None:
        """Do nothing, because torchrun itself stops the workers."""

    def preview_message(self, message: ToRunRank, stream: Stream) -> None:
        super().preview_message(message, stream)
        if isinstance(message, GenerationEnded):
            with self._changed:
                self._failure = max(self._failure, message.number if message.is_failure else -1)
                if self._round is not None and message.number == self._round.number:
                    self._is_over = True
                self._changed.notify_all()


SLICE_S = 0.1
LEAST_S = 0.001


class RoundOver(DistStoreError):
    """Raised by a wait for a key if the round has ended, because a node was lost, failed or wants to join."""


class RoundStore(PrefixStore):
    """Store in which torchrun's agents exchange their ranks. Its waits raise RoundOver if the round has ended."""

    def __init__(self, prefix: str, store: Store, is_over: Callable[[], bool]) -> None:
        super().__init__(prefix, store)
        self._is_over = is_over

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = self.timeout if timeout is None else timeout  # pyright: ignore[reportAttributeAccessIssue]
        ends_at = time.monotonic() + limit.total_seconds()
        while True:
            left_s = ends_at - time.monotonic()
            try:
                return super().wait(list(keys), timedelta(seconds=min(SLICE_S, max(LEAST_S, left_s))))
            except DistStoreError:
                if self._is_over():
                    raise RoundOver(f"the round is over, and {', '.join(keys)} will not be set in its store") from None
                if left_s <= SLICE_S:
                    raise
