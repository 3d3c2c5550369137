"""A rank's side of its manager: the requests for quorums, the votes, and the grants that come with them.

What the manager tells by itself comes by the watch (watch.py). A manager that has ended may be started again: for
a while it is waited for.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from agent_client.errors import AgentError, GroupDrained
from agent_client.manager_client.votes import PendingVote, VoteChannel
from agent_client.manager_client.wait_log import WaitLog
from agent_client.manager_client.watch import RankWatch
from agent_client.progress.progress import Progress
from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Distrust, World
from lighthouse_protocol.messages.session import Revoked
from lighthouse_protocol.refusals import DeadlinePassed, Drained, LighthouseError, Unreachable
from lighthouse_runtime.client.manager import ManagerClient

log = logging.getLogger(__name__)

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
