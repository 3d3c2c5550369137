"""One node of a torchrun job, as a rank of an elastic run: its rounds are generations. No torch."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from agent_client.progress.script_groups import SelfReporter
from agent_client.restart.rank_thread import DriverThread, Stream
from agent_client.restart.rules import events
from agent_client.restart.rules.events import RankConfig, RankPhase
from agent_client.restart.rules.machine import RankMachine
from lighthouse_protocol.messages.incident import EvidenceAsked
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import GenerationEnded, RankHello, RunCompleted, RunStopped, ToRunRank
from lighthouse_protocol.refusals import InternalError, LighthouseError

WAITS_FOR_S = 0.25  # a spare that is asked for has the whole limit again
_SLICES = 40
NEVER_S = 1e9

Outcome = RunCompleted | RunStopped | LighthouseError


class Node:
    """`limit_s`: how long it does without a lighthouse while it waits for a round. Methods are for any thread.

    What the lighthouse says arrives on the stream's thread, in the moment in which it is read.
    """

    def __init__(self, entry: RankHello, limit_s: float, open_stream: Callable[[], Stream]) -> None:
        # Workers are torchrun's to end: nothing here is killed.
        self._machine = RankMachine(entry, RankConfig(lighthouse_timeout_s=limit_s, hard_timeout_s=NEVER_S))
        self._thread = DriverThread(self._machine, open_stream, self, self._failed, self._hear)
        self._reporter = SelfReporter()
        self._changed = threading.Condition()
        self._round: events.Run | None = None
        self._is_over = False
        self._failure = -1
        self._outcome: Outcome | None = None
        self._has_left = False

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """The others know at once that it has gone; what waits in `join` ends."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()
        self._thread.leave()

    # -- what it is

    @property
    def slot(self) -> int:
        return self._machine.slot

    @property
    def is_spare(self) -> bool:
        return self._machine.phase is RankPhase.SPARE

    @property
    def has_lighthouse(self) -> bool:
        return self._machine.has_lighthouse

    @property
    def is_in_round(self) -> bool:
        return self._round is not None

    @property
    def outcome(self) -> Outcome | None:
        """Not None: there is no other round for it."""
        return self._outcome

    @property
    def is_over(self) -> bool:
        """The round that it is in: a node was lost, has failed or wants to come in. Not by the end of the whole run,
        which lets the others finish."""
        return self._is_over and not isinstance(self._outcome, RunCompleted)

    def is_over_within(self, limit_s: float) -> bool:
        """Waits for `limit_s`, in slices, so that a host that stood still has used up one."""
        with self._changed:
            return any(self._changed.wait_for(lambda: self.is_over, limit_s / _SLICES) for _ in range(_SLICES))

    @property
    def is_over_by_failure(self) -> bool:
        """Workers of a node have failed, of whichever."""
        return self._round is not None and self._failure >= self._round.number

    # -- what it wants

    def join(self, limit_s: float) -> events.Run | None:
        """The next round that it is in; None: there was none within `limit_s`, it has left, or there is none any more
        (`outcome`). A spare waits as long as it takes."""
        before = self._begin_to_wait()
        ends_at = time.monotonic() + limit_s
        with self._changed:
            while self._outcome is None and not self._has_left:
                told, now = self._round, time.monotonic()
                if told is not None and told.number > before:
                    if not self._is_over:
                        return told
                    before = told.number
                    self._thread.put(events.Waiting())
                if self.is_spare:
                    ends_at = now + limit_s
                if now >= ends_at:
                    return None
                self._changed.wait(min(WAITS_FOR_S, ends_at - now))
        return None

    def _begin_to_wait(self) -> int:
        """The number of the round that it leaves; -1: it is in none."""
        with self._changed:
            told = self._round
            if told is not None and not self._is_over:
                self._thread.put(events.Raised("its workers have failed, or were stopped"))
                self._is_over = True
            self._thread.put(events.Waiting())
        return -1 if told is None else told.number

    def finish(self) -> None:
        """Its workers have ended well."""
        self._thread.put(events.Returned())

    def close(self, limit_s: float) -> bool:
        """The run is to be over for all. Whether the lighthouse has said so within `limit_s`."""
        self._thread.put(events.Closing())
        with self._changed:
            return self._changed.wait_for(lambda: self._outcome is not None, limit_s)

    # -- for the driver, and the stream

    def run(self, run: events.Run) -> None:
        with self._changed:
            self._round, self._is_over = run, False
            self._changed.notify_all()

    def end(self, ended: events.Ended) -> None:
        with self._changed:
            self._outcome = ended.outcome
            self._changed.notify_all()

    def sample(self) -> ProgressSample | None:
        return None

    def interrupt(self, reason: str) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def kill(self, reason: str) -> None:
        """It has nothing that would have to be killed."""

    def _hear(self, message: ToRunRank, stream: Stream) -> None:
        if isinstance(message, EvidenceAsked):
            self._reporter.answer(message.number, stream.send)
        if isinstance(message, GenerationEnded):
            with self._changed:
                self._failure = max(self._failure, message.number if message.is_failure else -1)
                if self._round is not None and message.number == self._round.number:
                    self._is_over = True
                self._changed.notify_all()

    def _failed(self, error: InternalError) -> None:
        self.end(events.Ended(error))


# -- round store --------------------------------------------------------------
#
# The store of one round, for torchrun's agents: what waits in it ends with the round, not by the store's timeout.

SLICE_S = 0.1
LEAST_S = 0.001


class RoundOver(DistStoreError):
    """A node of the round was lost, has failed, or another wants to come in."""


class RoundStore(Store):
    """`inner`, until `is_over` says that the round is. Agents exchange their ranks here, and meet at the end."""

    def __init__(self, inner: Store, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._is_over = is_over

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout  # pyright: ignore[reportAttributeAccessIssue]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._wait([key], self.timeout)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._inner.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._wait(keys, self.timeout)
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._inner.multi_set(keys, values)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self.timeout if timeout is None else timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        ends_at = time.monotonic() + timeout.total_seconds()
        while True:
            left_s = ends_at - time.monotonic()
            try:
                return self._inner.wait(list(keys), timedelta(seconds=min(SLICE_S, max(LEAST_S, left_s))))
            except DistStoreError:
                if self._is_over():
                    raise RoundOver(f"the round is over, and {', '.join(keys)} will not be set in its store") from None
                if left_s <= SLICE_S:
                    raise
