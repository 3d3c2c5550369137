"""A rank's connection to its group's manager.

`ManagerConnection` requests quorums and sends votes. The answer to a vote may contain the grant for the next step.
Unsolicited messages from the manager arrive on the rank's watch (watch.py).

A manager may be restarted after a crash, so the rank tolerates the loss of its manager for a while.

`Presence` shows a rank to its manager while the rank is waiting for the other ranks in its group. `ExitReport` reports
the exception with which a rank exits. `WaitLog` logs what a long request for a quorum is waiting for.
"""

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType

from agent_client.errors import AgentError, GroupDrained
from agent_client.manager_client.watch import RankWatch
from agent_client.progress.progress import Progress
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Decision, Distrust
from lighthouse_protocol.refusals import DeadlinePassed, Drained, LighthouseError, Unreachable
from lighthouse_protocol.rules.quorum_change import QuorumWait
from lighthouse_runtime.client.clients import ManagerClient

log = logging.getLogger(__name__)

CHECKED_EVERY_S = 1.0  # interval at which a waiting rank checks what it is waiting for


class Presence:
    """Shows the manager that this rank is waiting for the other ranks in its group, and logs which ranks are missing.

    The Agent closes this object after opening its own watch with the same `rank_incarnation`.
    """

    def __init__(self, group_rank: int, meeting_place: str) -> None:
        self.rank_incarnation = secrets.token_hex(6)
        self._group_rank = group_rank
        self._meeting_place = meeting_place
        self._closed = threading.Event()
        self._client: ManagerClient | None = None
        self._watch: RankWatch | None = None

    def show(self, manager_address: str) -> None:
        """Open this rank's watch stream. Return within seconds, even if the manager does not answer."""
        progress = Progress()
        progress.waiting_for("the other ranks of its group").__enter__()
        self._client = ManagerClient(manager_address)
        self._watch = RankWatch(self._client, self._group_rank, self.rank_incarnation, progress)
        self._watch.ensure_open(wait_for_ready=True)
        threading.Thread(target=self._log, args=(self._watch,), name="lighthouse presence", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.close_unannounced()
        if self._client is not None:
            self._client.close()

    def _log(self, watch: RankWatch) -> None:
        logged = ""
        while not self._closed.wait(CHECKED_EVERY_S):
            if watch.waiting_for not in ("", logged):
                logged = watch.waiting_for
                log.warning("rank %d waits for the group at %s: %s", self._group_rank, self._meeting_place, logged)


class ExitReport:
    """Reports to the manager the exception that ends this rank, at most once.

    This is an uncaught exception, or one that leaves the Agent's `with` block. A forked child reports nothing.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._pid = os.getpid()
        self._is_over = False
        self._before = sys.excepthook
        self._hook = self._on_uncaught

    def install(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self._hook

    def uninstall(self) -> None:
        """Restore the previous sys.excepthook.

        If another hook was installed later, both stay in place, and this one only calls its predecessor.
        """
        self._is_over = True
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def send(self, error: BaseException | None) -> None:
        """Report `error`, unless it is None, GroupDrained, or a SystemExit with status 0."""
        is_good = error is None or isinstance(error, GroupDrained) or (isinstance(error, SystemExit) and not error.code)
        if is_good or self._is_over or os.getpid() != self._pid:
            return
        self._is_over = True
        self._report(f"{type(error).__name__}: {error}".rstrip(": "))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.send(error)
        finally:
            self._before(kind, error, trace)


class WaitLog:
    """Logs what a long request for a quorum is waiting for, on a separate thread, because the request blocks."""

    def __init__(self, group_rank: int, waiting_for: Callable[[], str]) -> None:
        self._group_rank = group_rank
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = 0

    @contextmanager
    def waiting(self, step: int) -> Generator[None]:
        """Log the wait for the quorum of `step` in the context. A retry after an exception continues the same wait."""
        with self._lock:
            self._step = step
            self._wait.begin(time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lighthouse waits", daemon=True)
            self._thread.start()
        try:
            yield
        except BaseException:
            with self._lock:
                self._wait.pause(time.monotonic())
            raise
        with self._lock:
            line = self._wait.finish(time.monotonic())
        if line:
            log.info("rank %d, step %d: %s", self._group_rank, step, line)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(CHECKED_EVERY_S):
            with self._lock:
                line, step = self._wait.next_line(self._waiting_for(), time.monotonic()), self._step
            if line:
                log.warning("rank %d, step %d: %s", self._group_rank, step, line)


ALIVE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
# After a drain, this rank stays connected because its peers may still need to read data that it has sent.
STAYS_AFTER_DRAIN_S = 10.0
COUNTED_BEFORE_CLOSE_S = 1.0  # time limit for the answer to a pending vote when the rank closes
DRAIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class SentVote:
    step: int
    vote: bool
    quorum_id: int | None
    ends_at: float
    """Deadline, by time.monotonic()."""
    answer: Future[Decision] = field(default_factory=Future[Decision])

    @property
    def left_s(self) -> float:
        return max(0.001, self.ends_at - time.monotonic())


class ManagerConnection:
    """A rank's connection to its manager. Send requests and votes from one thread."""

    def __init__(
        self,
        address: str,
        group_rank: int,
        rank_incarnation: str,
        on_revoked: Callable[[int | None, str], None],
        *,
        on_group_lost: Callable[[str], None] = lambda _: None,
        returns_within_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Prepare the connection without contacting the manager.

        `address` is host:port, or a join string, which also contains the manager's secret. The manager counts as lost
        when it has been unreachable for `returns_within_s` seconds. See RankWatch for the other arguments.
        """
        self.group_rank = group_rank
        self._rank_incarnation = rank_incarnation
        self._client = ManagerClient(address)
        self.address = self._client.address  # without the secret
        self.watch = RankWatch(self._client, group_rank, rank_incarnation, progress, on_revoked, on_group_lost)
        self._waits = WaitLog(group_rank, self._waiting_for)
        self._returns_within_s = returns_within_s
        self._lost_since: float | None = None
        self._has_reported = False
        self.asks_ahead = True  # whether a vote also requests the next step's grant
        self._unanswered: SentVote | None = None
        self._granted: Assignment | None = None
        self._has_answered = False

    def close(self, step: int | None = None) -> None:
        """Leave the group and close the connection. First wait briefly for the answer to a vote sent by `send_yes`.

        `step` is the next step that this rank would have requested, or None if it leaves in the middle of a step.
        """
        self.watch.is_closing = True
        vote, self._unanswered = self._unanswered, None
        if vote is not None:
            with suppress(LighthouseError, TimeoutError):
                vote.answer.result(COUNTED_BEFORE_CLOSE_S)
        self._waits.close()
        self.watch.close(step)
        self._client.close()

    def ask(
        self,
        step: int,
        checkpoint_address: str,
        *,
        tag_quorum_id: int | None,
        commit_failures: int,
        timeout_s: float,
        catch_up: CatchUp = PLAIN,
        distrust: Distrust | None = None,
        heals_first: bool | None = None,
    ) -> Assignment:
        """Return the assignment for `step`. Request it unless the answer to the last vote already contained it.

        See `quorum` in lighthouse_runtime/client/rpcs.py for the arguments.

        Raises:
            GroupDrained: The group was drained and has completed its last step.
            LighthouseError: The request failed.
        """
        self.watch.check_group()
        self._await_unanswered()
        granted, self._granted = self._granted, None
        if granted is not None and granted.max_step == step and commit_failures == 0:
            return granted
        try:
            with self._waits.waiting(step):
                self.ensure_watched()
                answer = self._client.quorum(
                    self.group_rank,
                    step,
                    checkpoint_address,
                    timeout_s=timeout_s,
                    tag_quorum_id=tag_quorum_id,
                    commit_failures=commit_failures,
                    rank_incarnation=self._rank_incarnation,
                    catch_up=catch_up,
                    compares=True,
                    distrust=distrust,
                    heals_first=heals_first,
                    wait_for_ready=not self._has_answered,  # after the first answer, fail fast if the manager is lost
                )
        except Drained as e:
            self.watch.is_drained = True
            log.warning("this rank stops training: %s", e)
            self.watch.wait_drained(STAYS_AFTER_DRAIN_S)
            raise GroupDrained(str(e)) from None
        self._has_answered, self._lost_since = True, None
        return answer

    def vote(self, step: int, vote: bool, *, quorum_id: int | None, timeout_s: float) -> bool:
        """Send a vote and return the decision of all ranks in the group. Raise LighthouseError if there is no decision.

        A yes is binding, so it is sent again if the connection is lost, until the manager answers or the time is up.
        """
        return self._await_decision(self._send(SentVote(step, vote, quorum_id, time.monotonic() + timeout_s)))

    def send_yes(self, step: int, *, quorum_id: int | None, timeout_s: float) -> None:
        """Send a yes vote without waiting for the answer. Use this when this rank alone decides the step.

        The vote is binding like any other. The next request for a quorum first waits for the answer.
        """
        self._unanswered = self._send(SentVote(step, True, quorum_id, time.monotonic() + timeout_s))

    def _await_unanswered(self) -> None:
        """Wait for the answer to a vote sent by `send_yes`. It may contain the assignment for the next step."""
        vote, self._unanswered = self._unanswered, None
        if vote is None:
            return
        try:
            if not self._await_decision(vote):
                log.warning("step %d: the vote came too late: the manager already considered this rank lost", vote.step)
        except LighthouseError as e:
            log.warning("step %d: the manager did not accept the vote: %s", vote.step, e)

    def _await_decision(self, vote: SentVote) -> bool:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                answer = vote.answer.result(vote.left_s)
            except (Unreachable, DeadlinePassed) as e:
                is_over = time.monotonic() + backoff_s >= vote.ends_at
                if not vote.vote or is_over or (isinstance(e, Unreachable) and self._is_given_up()):
                    raise
                log.warning("step %d: repeating the vote: %s", vote.step, e)
                time.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                self._send(vote)
            except TimeoutError:
                raise DeadlinePassed("the manager did not answer the vote in time") from None
            else:
                self._granted, self._lost_since = answer.next, None
                return answer.commit

    def _send(self, vote: SentVote) -> SentVote:
        self.ensure_watched()
        vote.answer = self.watch.send_vote(
            vote.step, vote.vote, vote.quorum_id, wants_next=self.asks_ahead, limit_s=vote.left_s
        )
        return vote

    def report(self, reason: str, *, ends_group: bool = False) -> None:
        """Report to the manager why this rank is about to exit. Later calls do nothing.

        `ends_group` means that the other ranks in the group cannot continue either.
        """
        if self._has_reported:
            return
        self._has_reported = True
        try:
            # The message of an exception may be longer than a call's limit, or contain a lone surrogate.
            self._client.report(self.group_rank, self._rank_incarnation, cut_reason(reason), ends_group=ends_group)
        except LighthouseError as e:
            log.info("cannot report to the manager why this rank ends: %s", e)

    def drain(self, reason: str) -> None:
        self._client.report(self.group_rank, self._rank_incarnation, reason, drains=True, timeout_s=DRAIN_TIMEOUT_S)

    def check_alive(self, error: LighthouseError) -> bool:
        """Return whether the manager is alive, after a request to it has failed with `error`.

        If so, the request failed for another reason, for example because no quorum formed in time.

        Raises:
            AgentError: The manager has been unreachable for longer than `returns_within_s`.
        """
        if not isinstance(error, Unreachable):
            return True
        try:
            self._client.status(timeout_s=ALIVE_TIMEOUT_S)
        except Unreachable as e:
            if self._is_given_up():
                raise AgentError(f"lost the group's manager: {e}; restart the group") from error
            return False
        return True

    def _is_given_up(self) -> bool:
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        return now - self._lost_since >= self._returns_within_s

    def _waiting_for(self) -> str:
        if self.watch.is_open:
            return self.watch.waiting_for or f"the manager at {self.address} to answer"
        return f"the manager at {self.address}, which does not answer: start it, or fix LIGHTHOUSE_MANAGER_ADDRESS"

    def ensure_watched(self) -> None:
        self.watch.ensure_open(wait_for_ready=not self._has_answered)
