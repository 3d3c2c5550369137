"""A rank's side of its manager: the watch, the requests for quorums, the votes, and the grants that come with them.

The watch is a stream on a thread of its own: by it the manager knows that this rank lives, and tells it at once when
its quorum is revoked. A grant and its revoke travel on different streams, so revoked ids are remembered. The end of
the watch is a revoke of whatever is held. A manager that has ended may be started again: for a while it is waited for.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from agent_client import evidence
from agent_client.ballots import Ballots, Cast, Said
from agent_client.errors import AgentError, GroupDrained
from agent_client.progress import Progress
from lighthouse_runtime.clients import ManagerClient
from lighthouse_runtime.process import host_id, started_at
from lighthouse_runtime.streams import Watch
from protos.membership import PLAIN, Assignment, CatchUp, Vote, World
from protos.progress import Sample
from protos.refusals import DeadlinePassed, Drained, LighthouseError, NotServed, Unreachable
from protos.session import (
    Counted,
    EvidenceAsked,
    Killed,
    Leaving,
    RankGone,
    Revoked,
    ToRank,
    WatchOpened,
    WatchRequest,
)

log = logging.getLogger(__name__)

ALIVE_TIMEOUT_S = 5.0
WATCHED_WITHIN_S = 5.0
REVOKED_KEPT = 64
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
# After a drain the group's peers may still read what this rank has sent them.
STAYS_AFTER_DRAIN_S = 10.0
COUNTED_BEFORE_CLOSE_S = 1.0
LEFT_WITHIN_S = 1.0
SAMPLED_EVERY_S = 0.5


class ManagerLink:
    """`on_revoked(quorum_id, reason)` is called on the watch's thread; None stands for every quorum of before.

    `on_group_lost(reason)`, on the same thread: a rank of the group is gone for good; what waits for it is to be ended.
    `returns_within_s`: how long a manager that has ended is waited for. `progress`: what it is told of where this rank
    is, twice a second, from the thread that sends the votes.
    """

    def __init__(
        self,
        address: str,
        group_rank: int,
        worker: str,
        on_revoked: Callable[[int | None, str], None],
        *,
        on_group_lost: Callable[[str], None] = lambda _: None,
        returns_within_s: float,
        progress: Progress | None = None,
    ) -> None:
        self.address = address
        self._group_rank = group_rank
        self._worker = worker
        self._on_revoked = on_revoked
        self._on_group_lost = on_group_lost
        self._why_group_lost: str | None = None
        self._takes_leave = False
        self._progress = progress
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
        self._ballots = Ballots()
        self._told: tuple[Said, Cast | None] | None = None
        self._granted: Assignment | None = None
        self._has_answered = False
        self.world: World | None = None  # as it was told last; None: never
        self._looks = evidence.Looks()

    def close(self) -> None:
        """A yes that was told is counted before, if the manager answers at once."""
        self._is_closed = True
        told, self._told = self._told, None
        if told is not None and (cast := told[1]) is not None:
            with suppress(LighthouseError):
                self._ballots.result(cast, COUNTED_BEFORE_CLOSE_S)
        if self._watch is not None:
            self._leave(self._watch)
        self._client.close()

    def _leave(self, watch: Watch) -> None:
        """Say that this is no failure, where that is understood."""
        if self._takes_leave and not self._has_ended.is_set():
            watch.send(Leaving())
            watch.end()
            self._has_ended.wait(LEFT_WITHIN_S)
        watch.cancel()

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
        self._check_group()
        self._settle()
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
        said = Said(step, vote, quorum_id, time.monotonic() + timeout_s)
        return self._learn(said, self._cast(said))

    def tell(self, step: int, *, quorum_id: int | None, timeout_s: float) -> None:
        """Vote yes where that is the decision. It is bound like any other: its answer is awaited before the next
        request for a quorum."""
        said = Said(step, True, quorum_id, time.monotonic() + timeout_s)
        self._told = said, self._cast(said)

    def _settle(self) -> None:
        """The answer to what was told. No answer changes the decision; it may bring the next grant."""
        told, self._told = self._told, None
        if told is None:
            return
        try:
            if not self._learn(*told):
                log.warning("step %d: the manager had given this rank up when its yes came", told[0].step)
        except LighthouseError as e:
            log.warning("step %d: the manager has not taken the yes: %s", told[0].step, e)

    def _learn(self, said: Said, cast: Cast | None) -> bool:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                answer = self._answer(said, cast)
            except (Unreachable, DeadlinePassed) as e:
                is_over = time.monotonic() + backoff_s >= said.ends_at
                if not said.vote or is_over or (isinstance(e, Unreachable) and self._is_given_up()):
                    raise
                log.warning("step %d: the vote is repeated: %s", said.step, e)
                time.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                self._ensure_watched()
                cast = self._cast(said)
            else:
                self._granted, self._gone_since = answer.next, None
                return answer.commit

    @property
    def _wants_next(self) -> bool:
        return self.asks_ahead and self._is_served

    def _cast(self, said: Said) -> Cast | None:
        return self._ballots.cast(said, wants_next=self._wants_next)

    def _answer(self, said: Said, cast: Cast | None) -> Vote:
        if cast is not None:
            return self._ballots.result(cast, said.left_s)
        return self._client.vote(
            self._group_rank,
            said.step,
            said.vote,
            timeout_s=said.left_s,
            quorum_id=said.quorum_id,
            wants_next=self._wants_next,
            wait_for_ready=False,
        )

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

    def _check_group(self) -> None:
        if self._why_group_lost is not None:
            raise AgentError(f"this replica group is lost: {self._why_group_lost}; restart the group")

    # -- the watch

    def _ensure_watched(self) -> None:
        """Before the first request, so that the manager knows from the start when this rank ends."""
        if not self._is_served or (self._watch is not None and not self._has_ended.is_set()):
            return
        self._has_ended.clear()
        self._is_watched.clear()
        pid = os.getpid()
        where = (host_id(), started_at(pid), socket.gethostname())
        request = WatchRequest(self._group_rank, self._worker, pid, *where, evidence.offer(), takes_world=True)
        self._watch = self._client.watch(request, wait_for_ready=not self._has_answered)
        self._ballots.open(self._watch)
        threading.Thread(target=self._follow, args=(self._watch,), name="lighthouse watch", daemon=True).start()
        self._is_watched.wait(WATCHED_WITHIN_S)

    def _follow(self, watch: Watch) -> None:
        reason = f"the manager at {self.address} has ended the watch"
        try:
            for message in watch:
                self._take(message, watch)
        except NotServed as e:
            self._is_served = False  # an older manager: without a watch, as before
            self._ballots.end(Unreachable(str(e)))
            self._is_watched.set()
            return
        except LighthouseError as e:
            reason = str(e)
        self._ballots.end(Unreachable(reason))
        self._has_ended.set()
        self._is_watched.set()
        if not self._is_closed:
            log.warning("the manager is lost: %s", reason)
            self._on_revoked(None, reason)

    def _sample(self) -> Sample | None:
        """That nobody can tell where this rank is is no reason to end its watch."""
        assert self._progress is not None
        try:
            return self._progress.sample()
        except Exception:
            log.exception("where this rank is cannot be told")
            return None

    def _take(self, message: ToRank, watch: Watch) -> None:
        match message:
            case Counted():
                self._ballots.take(message)
            case World():
                if message.pending and (self.world is None or message.pending != self.world.pending):
                    log.info("ask to come in: %s", ", ".join(message.pending))
                self.world = message
            case WatchOpened(takes_progress, takes_leave):
                self._takes_leave = takes_leave
                if takes_progress and self._progress is not None:
                    watch.repeat(self._sample, SAMPLED_EVERY_S)
                self._is_watched.set()
            case Revoked(quorum_id, reason):
                self._revoked[quorum_id] = reason
                while len(self._revoked) > REVOKED_KEPT:
                    del self._revoked[next(iter(self._revoked))]
                self._on_revoked(quorum_id, reason)
            case RankGone(_, reason):
                self._why_group_lost = reason
                log.error("this replica group is lost: %s", reason)
                self._on_group_lost(reason)
            case EvidenceAsked(number):
                self._looks.answer(number, watch.send)
            case Killed(reason):
                log.error("killed by the manager: %s", reason)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
