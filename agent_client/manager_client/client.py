"""A rank's side of its manager: the requests for quorums, the votes, and the grants that come with them.

What the manager tells by itself comes by the watch (watch.py). A manager that has ended may be started again: for
a while it is waited for.
"""

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Self

from agent_client.errors import AgentError, GroupDrained
from agent_client.manager_client.watch import PendingVote, RankWatch, VoteChannel
from agent_client.progress.progress import Progress
from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, World
from lighthouse_protocol.messages.session import Revoked
from lighthouse_protocol.refusals import DeadlinePassed, Drained, LighthouseError, Unreachable
from lighthouse_protocol.rules.quorum_change import QuorumWait
from lighthouse_runtime.client.clients import ManagerClient

log = logging.getLogger(__name__)


# -- presence -----------------------------------------------------------------
#
# A rank that waits for the other ranks of its group: seen by its manager, and told which of them are missing.

LOOKED_EVERY_S = 1.0


class Presence:
    """A context manager, whose end closes the watch that `show` has opened.

    The Agent's own watch, of the same `rank_incarnation`, takes its place. `meeting_place` is where the ranks of the
    group find each other.
    """

    def __init__(self, group_rank: int, meeting_place: str) -> None:
        self.rank_incarnation = secrets.token_hex(6)
        self._group_rank = group_rank
        self._meeting_place = meeting_place
        self._closed = threading.Event()
        self._client: ManagerClient | None = None
        self._watch: RankWatch | None = None

    def show(self, manager_address: str) -> None:
        """Returns within a few seconds, also if the manager does not answer: the request for a quorum reports that."""
        progress = Progress()
        progress.waiting_for("the other ranks of its group").__enter__()
        self._client = ManagerClient(manager_address)
        self._watch = RankWatch(
            self._client,
            self._group_rank,
            self.rank_incarnation,
            VoteChannel(),
            lambda *_: None,
            lambda _: None,
            progress,
        )
        self._watch.ensure_open(wait_for_ready=True)
        threading.Thread(target=self._log, args=(self._watch,), name="lighthouse presence", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.give_up()
        if self._client is not None:
            self._client.close()

    def _log(self, watch: RankWatch) -> None:
        """Each change of what the manager says is missing."""
        told = ""
        while not self._closed.wait(LOOKED_EVERY_S):
            if watch.waiting_for not in ("", told):
                told = watch.waiting_for
                log.warning("rank %d waits for the group at %s: %s", self._group_rank, self._meeting_place, told)


# -- exit report --------------------------------------------------------------
#
# Reports to the manager, at once, the exception by which a rank ends.
#
# Such an exception is uncaught, or leaves the `with` block of the Agent. A forked child reports nothing for its
# parent.


class ExitReport:
    """Calls `report` at most once. It stands in sys.excepthook from `install` to `uninstall`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._pid = os.getpid()
        self._is_over = False
        self._before = sys.excepthook
        self._hook = self._on_uncaught

    def install(self) -> None:
        self._before, sys.excepthook = sys.excepthook, self._hook

    def uninstall(self) -> None:
        """If another hook was installed since, it stays, and this one passes on."""
        self._is_over = True
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def send(self, error: BaseException | None) -> None:
        """Report a failure: a clean exit and a drained group are none."""
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


# -- wait log -----------------------------------------------------------------
#
# A rank's own lines on a wait for a quorum that lasts: what for. On a thread of its own, since the request blocks.

CLOSED_WITHIN_S = 1.0


class WaitLog:
    """`waiting_for` says it, in words; it is asked on that thread."""

    def __init__(self, group_rank: int, waiting_for: Callable[[], str]) -> None:
        self._group_rank = group_rank
        self._waiting_for = waiting_for
        self._wait = QuorumWait()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_idle = self._is_closed = False
        self._step = 0

    @contextlib.contextmanager
    def waiting(self, step: int) -> Generator[None]:
        """A request for the quorum of that step is under way. An exception that leaves the block is no answer."""
        self._begin(step)
        try:
            yield
        except BaseException:
            with self._changed:
                self._wait.pause(time.monotonic())
                self._changed.notify()
            raise
        with self._changed:
            line = self._wait.finish(time.monotonic())
            if line:
                self._changed.notify()  # it looks again late in a wait that it has spoken of
        if line:
            log.info("rank %d, step %d: %s", self._group_rank, step, line)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSED_WITHIN_S)

    def _begin(self, step: int) -> None:
        with self._changed:
            self._step = step
            self._wait.begin(time.monotonic())
            if self._is_idle:
                self._changed.notify()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="lighthouse waits", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                line, step = self._wait.next_line(self._waiting_for(), time.monotonic()), self._step
                if not line:
                    next_at = self._wait.next_at(time.monotonic())
                    self._is_idle = next_at is None
                    self._changed.wait(None if next_at is None else max(0.0, next_at - time.monotonic()))
            if line:
                log.warning("rank %d, step %d: %s", self._group_rank, step, line)


ALIVE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
# After a drain the group's peers may still read what this rank has sent them.
STAYS_AFTER_DRAIN_S = 10.0
COUNTED_BEFORE_CLOSE_S = 1.0
DRAIN_TIMEOUT_S = 5.0


class ManagerConnection:
    """`on_revoked(quorum_id, reason)` is called on the watch's thread; None stands for every quorum of before.

    `on_group_lost(reason)`, on the same thread: a rank of the group is gone for good; what waits for it is to be ended.
    `returns_within_s`: how long a manager that has ended is waited for. `progress`: what it is told of where this rank
    is, twice a second, from the thread that sends the votes.
    """

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
        self.group_rank = group_rank
        self._rank_incarnation = rank_incarnation
        self._client = ManagerClient(address)
        self.address = self._client.address  # without the secret
        self._votes = VoteChannel()
        callbacks = (on_revoked, on_group_lost)
        self._watch = RankWatch(self._client, group_rank, rank_incarnation, self._votes, *callbacks, progress)
        self._waits = WaitLog(group_rank, self._waiting_for)
        self._returns_within_s = returns_within_s
        self._gone_since: float | None = None
        self._has_reported = False
        self.asks_ahead = True  # a vote asks for the next step's grant
        self._told: PendingVote | None = None
        self._granted: Assignment | None = None
        self._has_answered = False

    def open(self) -> None:
        """Be watched from now on, not from the first request on."""
        self._ensure_watched()

    def close(self, step: int | None = None) -> None:
        """Leave; `step` as in Leaving. A yes that was told is counted before, if the manager answers at once."""
        self._watch.is_closing = True
        told, self._told = self._told, None
        if told is not None:
            with suppress(LighthouseError):
                self._votes.result(told, COUNTED_BEFORE_CLOSE_S)
        self._waits.close()
        self._watch.close(step)
        self._client.close()

    @property
    def world(self) -> World | None:
        """As it was told last; None: never."""
        return self._watch.world

    def revoked(self, quorum_id: int) -> str | None:
        """Why that quorum was revoked; None: it was not."""
        return self._watch.revoked(quorum_id)

    def why_lost(self, quorum_id: int, within_s: float) -> Revoked | None:
        """The group that this quorum has lost, and why; None: none is named within that time."""
        return self._watch.why_lost(quorum_id, within_s)

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
        """The quorum for `step`; a grant that came with the last decision costs nothing.

        Raises GroupDrained when the group has done its last step, and what ManagerClient.quorum raises.
        """
        self._watch.check_group()
        self._settle()
        granted, self._granted = self._granted, None
        if granted is not None and granted.max_step == step and commit_failures == 0:
            return granted
        try:
            with self._waits.waiting(step):
                self._ensure_watched()
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
                    wait_for_ready=not self._has_answered,  # once it has answered, a manager that does not is gone
                )
        except Drained as e:
            self._watch.is_drained = True
            log.warning("this rank stops training: %s", e)
            self._watch.wait_ended(STAYS_AFTER_DRAIN_S)
            raise GroupDrained(str(e)) from None
        self._has_answered, self._gone_since = True, None
        return answer

    def vote(self, step: int, vote: bool, *, quorum_id: int | None, timeout_s: float) -> bool:
        """The decision of all ranks of the group. A yes is bound: it is repeated until there is one, or no time left.

        Raises LighthouseError: the manager refuses the vote, is gone, or has not answered in time.
        """
        return self._learn(self._send(PendingVote(step, vote, quorum_id, time.monotonic() + timeout_s)))

    def tell(self, step: int, *, quorum_id: int | None, timeout_s: float) -> None:
        """Vote yes where that is the decision. It is bound like any other: its answer is awaited before the next
        request for a quorum."""
        self._told = self._send(PendingVote(step, True, quorum_id, time.monotonic() + timeout_s))

    def _settle(self) -> None:
        """The answer to what was told. No answer changes the decision; it may bring the next grant."""
        told, self._told = self._told, None
        if told is None:
            return
        try:
            if not self._learn(told):
                log.warning("step %d: the vote came too late: the manager already considered this rank lost", told.step)
        except LighthouseError as e:
            log.warning("step %d: the manager did not accept the vote: %s", told.step, e)

    def _learn(self, vote: PendingVote) -> bool:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                answer = self._votes.result(vote, vote.left_s)
            except (Unreachable, DeadlinePassed) as e:
                is_over = time.monotonic() + backoff_s >= vote.ends_at
                if not vote.vote or is_over or (isinstance(e, Unreachable) and self._is_given_up()):
                    raise
                log.warning("step %d: repeating the vote: %s", vote.step, e)
                time.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                self._send(vote)
            else:
                self._granted, self._gone_since = answer.next, None
                return answer.commit

    def _send(self, vote: PendingVote) -> PendingVote:
        self._ensure_watched()
        self._votes.send(vote, wants_next=self.asks_ahead)
        return vote

    def report(self, reason: str, *, ends_group: bool = False) -> None:
        """This rank is about to end; `ends_group`: and no rank of its group can go on. The first reason counts."""
        if self._has_reported:
            return
        self._has_reported = True
        try:
            self._client.report(self.group_rank, self._rank_incarnation, reason, ends_group=ends_group)
        except LighthouseError as e:
            log.info("cannot report to the manager why this rank ends: %s", e)

    def drain(self, reason: str) -> None:
        """Ask the manager to have this group leave after its step. Raises LighthouseError."""
        self._client.report(self.group_rank, self._rank_incarnation, reason, drains=True, timeout_s=DRAIN_TIMEOUT_S)

    @property
    def is_watched(self) -> bool:
        """The manager knows this rank."""
        return self._watch.is_open

    def check_alive(self, error: LighthouseError) -> bool:
        """Whether the manager answers, and has only had no quorum. Raises AgentError if it is gone for good."""
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
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= self._returns_within_s

    def _waiting_for(self) -> str:
        """As the manager has told, or else that it does not."""
        if self._watch.is_open:
            return self._watch.waiting_for or f"the manager at {self.address} to answer"
        return f"the manager at {self.address}, which does not answer: start it, or fix LIGHTHOUSE_MANAGER_ADDRESS"

    def _ensure_watched(self) -> None:
        self._watch.ensure_open(wait_for_ready=not self._has_answered)
