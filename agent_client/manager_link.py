"""A rank's side of its manager: the watch, the requests for quorums, the votes, and the grants that come with them.

The watch is a stream on a thread of its own: by it the manager knows that this rank lives, and tells it at once when
its quorum is revoked. A grant and its revoke travel on different streams, so revoked ids are remembered. The end of
the watch is a revoke of whatever is held. A manager that has ended may be started again: for a while it is waited for.
"""

import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from agent_client.errors import AgentError, GroupDrained
from lighthouse_runtime.clients import ManagerClient
from lighthouse_runtime.process import host_id, started_at
from lighthouse_runtime.streams import Watch
from protos.membership import PLAIN, Assignment, CatchUp, Vote
from protos.refusals import DeadlinePassed, Drained, LighthouseError, NotServed, Unreachable
from protos.session import Ballot, Counted, Killed, Revoked, ToRank, WatchOpened, WatchRequest

log = logging.getLogger(__name__)

ALIVE_TIMEOUT_S = 5.0
WATCHED_WITHIN_S = 5.0
REVOKED_KEPT = 64
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
# After a drain the group's peers may still read what this rank has sent them.
STAYS_AFTER_DRAIN_S = 10.0


class ManagerLink:
    """`on_revoked(quorum_id, reason)` is called on the watch's thread; None stands for every quorum of before.

    `returns_within_s`: how long a manager that has ended is waited for.
    """

    def __init__(
        self,
        address: str,
        group_rank: int,
        worker: str,
        on_revoked: Callable[[int | None, str], None],
        *,
        returns_within_s: float,
    ) -> None:
        self.address = address
        self._group_rank = group_rank
        self._worker = worker
        self._on_revoked = on_revoked
        self._client = ManagerClient(address)
        self._watch: Watch | None = None
        self._is_watched = threading.Event()
        self._has_ended = threading.Event()
        self._returns_within_s = returns_within_s
        self._gone_since: float | None = None
        self._is_served = True
        self.asks_ahead = True  # a vote asks for the next step's grant
        self._is_closed = False
        self._revoked: dict[int, str] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ballots: dict[int, queue.SimpleQueue[Vote | LighthouseError]] = {}
        self._granted: Assignment | None = None
        self._has_answered = False

    def close(self) -> None:
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._client.close()

    @property
    def has_grant(self) -> bool:
        """The next request for a quorum is answered already."""
        return self._granted is not None

    def revoked(self, quorum_id: int) -> str | None:
        """Why that quorum was revoked; None: it was not."""
        return self._revoked.get(quorum_id)

    def ask(
        self,
        step: int,
        checkpoint_address: str,
        *,
        tag_quorum_id: int | None,
        commit_failures: int,
        timeout_s: float,
        catch_up: CatchUp = PLAIN,
    ) -> Assignment:
        """The quorum for `step`; a grant that came with the last decision costs nothing.

        Raises GroupDrained when the group has done its last step, and what ManagerClient.quorum raises.
        """
        granted, self._granted = self._granted, None
        if granted is not None and granted.max_step == step and commit_failures == 0:
            return granted
        self._ensure_watched()
        try:
            answer = self._client.quorum(
                self._group_rank,
                step,
                checkpoint_address,
                timeout_s=timeout_s,
                tag_quorum_id=tag_quorum_id,
                commit_failures=commit_failures,
                worker=self._worker,
                catch_up=catch_up,
                wait_for_ready=not self._has_answered,  # once it has answered, a manager that does not is gone
            )
        except Drained as e:
            self._has_ended.wait(STAYS_AFTER_DRAIN_S)
            raise GroupDrained(str(e)) from None
        self._has_answered, self._gone_since = True, None
        return answer

    def vote(self, step: int, vote: bool, *, quorum_id: int | None, timeout_s: float) -> bool:
        """The decision of all ranks of the group. A yes is bound: it is repeated until there is one, or no time left.

        Raises what ManagerClient.vote raises.
        """
        ends_at = time.monotonic() + timeout_s
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                left_s = max(0.001, ends_at - time.monotonic())
                wants_next = self.asks_ahead and self._is_served
                answer = self._cast(Ballot(next(self._numbers), step, vote, quorum_id, wants_next, left_s))
            except (Unreachable, DeadlinePassed) as e:
                is_over = time.monotonic() + backoff_s >= ends_at
                if not vote or is_over or (isinstance(e, Unreachable) and self._is_given_up()):
                    raise
                log.warning("step %d: the vote is repeated: %s", step, e)
                time.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                self._ensure_watched()
            else:
                self._granted, self._gone_since = answer.next, None
                return answer.commit

    def _cast(self, ballot: Ballot) -> Vote:
        """Over the watch, where it is open: a message on a stream costs half of a call."""
        counted: queue.SimpleQueue[Vote | LighthouseError] = queue.SimpleQueue()
        with self._lock:
            watch = self._watch if self._is_served and not self._has_ended.is_set() else None
            if watch is not None:
                self._ballots[ballot.number] = counted
        if watch is None:
            return self._client.vote(
                self._group_rank,
                ballot.step,
                ballot.vote,
                timeout_s=ballot.time_left_s,
                quorum_id=ballot.quorum_id,
                wants_next=ballot.wants_next,
                wait_for_ready=False,
            )
        watch.send(ballot)
        try:
            outcome = counted.get(timeout=ballot.time_left_s)
        except queue.Empty:
            raise DeadlinePassed(f"{self.address} gave no answer within {ballot.time_left_s:g} s") from None
        finally:
            self._ballots.pop(ballot.number, None)
        if isinstance(outcome, LighthouseError):
            raise outcome
        return outcome

    def report(self, reason: str) -> None:
        """This rank is about to end."""
        try:
            self._client.report(self._group_rank, self._worker, reason)
        except LighthouseError as e:
            log.info("the manager was not told why this rank ends: %s", e)

    def check_alive(self, error: LighthouseError) -> bool:
        """Whether the manager answers, and has only had no quorum. Raises AgentError if it is gone for good."""
        if not isinstance(error, Unreachable):
            return True
        try:
            self._client.status(timeout_s=ALIVE_TIMEOUT_S)
        except Unreachable as e:
            if self._is_given_up():
                raise AgentError(f"the group's manager is gone: {e}; restart the group") from error
            return False
        return True

    def _is_given_up(self) -> bool:
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= self._returns_within_s

    # -- the watch

    def _ensure_watched(self) -> None:
        """Before the first request, so that the manager knows from the start when this rank ends."""
        if not self._is_served or (self._watch is not None and not self._has_ended.is_set()):
            return
        self._has_ended.clear()
        self._is_watched.clear()
        pid = os.getpid()
        request = WatchRequest(self._group_rank, self._worker, pid, host_id(), started_at(pid))
        self._watch = self._client.watch(request, wait_for_ready=not self._has_answered)
        threading.Thread(target=self._follow, args=(self._watch,), name="lighthouse watch", daemon=True).start()
        self._is_watched.wait(WATCHED_WITHIN_S)

    def _follow(self, watch: Watch) -> None:
        reason = f"the manager at {self.address} has ended the watch"
        try:
            for message in watch:
                self._take(message)
        except NotServed:
            self._is_served = False  # an older manager: without a watch, as before
            self._is_watched.set()
            return
        except LighthouseError as e:
            reason = str(e)
        self._end_ballots(Unreachable(reason))
        self._is_watched.set()
        if not self._is_closed:
            log.warning("the manager is lost: %s", reason)
            self._on_revoked(None, reason)

    def _end_ballots(self, error: LighthouseError) -> None:
        with self._lock:
            self._has_ended.set()
            waiting, self._ballots = self._ballots, {}
        for counted in waiting.values():
            counted.put(error)

    def _take(self, message: ToRank) -> None:
        match message:
            case Counted(number, outcome):
                if (counted := self._ballots.pop(number, None)) is not None:  # else it came too late
                    counted.put(outcome)
            case WatchOpened():
                self._is_watched.set()
            case Revoked(quorum_id, reason):
                self._revoked[quorum_id] = reason
                while len(self._revoked) > REVOKED_KEPT:
                    del self._revoked[next(iter(self._revoked))]
                self._on_revoked(quorum_id, reason)
            case Killed(reason):
                log.error("killed by the manager: %s", reason)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
