"""A rank's watch: the stream between the rank and its manager.

The open stream shows the manager that the rank is alive, and carries the rank's progress. The manager uses the stream
to report revoked quorums, lost ranks and other events immediately. Votes also use the stream, because a message on an
open stream costs half as much as a call.

A separate thread reads the stream. The grant and the revocation of a quorum may arrive in any order, so the ids of
revoked quorums are stored. When the stream closes, every quorum counts as revoked.
"""

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from agent_client.errors import AgentError
from agent_client.progress import script_groups as self_report
from agent_client.progress.progress import Progress, ScriptProgress
from lighthouse_protocol.messages.chaos import FaultKind, FaultOrder
from lighthouse_protocol.messages.incident import EvidenceAsked
from lighthouse_protocol.messages.membership import Decision, World
from lighthouse_protocol.messages.preemption import PreemptionChanged
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.session import (
    Killed,
    Leaving,
    RankGone,
    Released,
    Revoked,
    ToRank,
    Vote,
    VoteAnswer,
    Waiting,
    WatchHello,
    WatchOpened,
)
from lighthouse_protocol.refusals import LighthouseError, Unreachable
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.client.streams import Watch
from lighthouse_runtime.process.children import host_id, started_at

log = logging.getLogger(__name__)


OPENED_WITHIN_S = 5.0
LEFT_WITHIN_S = 1.0
RELEASED_WITHIN_S = 10.0
"""Time in seconds that a leaving rank waits for Released, because peers still in the last step may need its data."""
REVOKED_KEPT = 64  # quorum ids
SAMPLED_EVERY_S = 0.5


class RankWatch:
    def __init__(
        self,
        client: ManagerClient,
        group_rank: int,
        rank_incarnation: str,
        progress: Progress | ScriptProgress | None,
        on_revoked: Callable[[int | None, str], None] = lambda *_: None,
        on_group_lost: Callable[[str], None] = lambda _: None,
        *,
        is_observer: bool = False,
    ) -> None:
        """Prepare the watch without opening it.

        Args:
            client: Client for the manager.
            group_rank: Rank inside the replica group.
            rank_incarnation: Unique name of this process.
            progress: Progress to report, sampled twice a second on the thread that sends votes. None to report nothing.
            on_revoked: Called with a quorum's id and a reason when the quorum is revoked. The id is None if all quorums
                are revoked. Called on the watch's thread, like `on_group_lost`.
            on_group_lost: Called with the reason when a rank in the group is lost for good and the group must restart.
            is_observer: Whether the rank only reports its progress, and takes part in no quorum.
        """
        self.world: World | None = None  # the latest World message, or None before the first
        self.preemption = PreemptionChanged(None)  # the latest message
        self.waiting_for = ""  # latest report of what requests for a quorum are waiting for
        self.is_drained = False  # True if the group has finished its last step, so the manager is expected to exit
        self.is_closing = is_observer  # True if the end of the stream is expected, and not logged
        self._client = client
        self._group_rank = group_rank
        self._rank_incarnation = rank_incarnation
        self._votes: dict[int, Future[Decision]] = {}
        """Futures of the unanswered votes, by vote number."""
        self._numbers = itertools.count(1)
        self._on_revoked = on_revoked
        self._on_group_lost = on_group_lost
        self._progress = progress
        self._is_observer = is_observer
        self._reporter = self_report.SelfReporter()
        self._stream: Watch | None = None
        self._thread: threading.Thread | None = None
        self._has_opened = threading.Event()
        self._has_ended = threading.Event()
        self._is_released = False
        self._revoked: dict[int, Revoked] = {}
        self._changed = threading.Condition()
        self._why_group_lost: str | None = None
        self._faults: dict[str, float] = {}  # when each fault ordered by `lighthouse chaos` ends

    def ensure_open(self, *, wait_for_ready: bool) -> None:
        """Open the watch unless it is already open.

        Call this before the first request, so that the manager notices if this rank exits during the request. With
        `wait_for_ready`, the stream waits for an unreachable manager instead of failing at once, as in gRPC.
        """
        if self._stream is not None and not self._has_ended.is_set():
            return
        if self._thread is not None:  # it may still be about to abort the collectives of earlier quorums
            self._thread.join(OPENED_WITHIN_S)
        pid = os.getpid()
        where = (host_id(), started_at(pid), socket.gethostname())
        offer = self_report.offer()
        request = WatchHello(self._group_rank, self._rank_incarnation, pid, *where, offer, self._is_observer)
        stream = self._client.watch(request, wait_for_ready=wait_for_ready)
        with self._changed:
            self._stream = stream
            self._has_ended.clear()
            self._has_opened.clear()
        self._thread = threading.Thread(target=self._follow, args=(stream,), name="lighthouse watch", daemon=True)
        self._thread.start()
        self._has_opened.wait(OPENED_WITHIN_S)

    @property
    def is_open(self) -> bool:
        """True if the manager has accepted the watch and the stream has not closed since then."""
        return self._has_opened.is_set() and not self._has_ended.is_set()

    def close(self, step: int | None) -> None:
        """Announce a normal exit, wait until no peer needs this rank any longer, and close the stream.

        `step` is the next step that this rank would have requested, or None if it leaves in the middle of a step.
        """
        self.is_closing = True
        stream = self._stream
        if stream is None:
            return
        if self.is_open:
            stream.send(Leaving(step))
            stays_s = 0.0 if self._is_observer else RELEASED_WITHIN_S
            with self._changed:
                self._changed.wait_for(lambda: self._is_released or self._has_ended.is_set(), stays_s)
            stream.end()
            self._has_ended.wait(LEFT_WITHIN_S)
        stream.cancel()

    def close_unannounced(self) -> None:
        """Close the stream without announcing an exit. Use this for a rank that has opened another watch."""
        self.is_closing = True
        if self._stream is not None:
            self._stream.cancel()

    def wait_drained(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until the manager closes the watch after a drain, or requests a checkpoint."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended.is_set() or self.preemption.should_save, within_s)

    def revoked(self, quorum_id: int) -> str | None:
        revoked = self._revoked.get(quorum_id)
        return revoked.reason if revoked is not None else None

    def why_lost(self, quorum_id: int, within_s: float) -> Revoked | None:
        """Wait up to `within_s` seconds until the quorum's revocation names a lost group. Return it, or None."""

        def find() -> Revoked | None:
            revoked = self._revoked.get(quorum_id)
            return revoked if revoked is not None and revoked.lost else None

        with self._changed:
            self._changed.wait_for(lambda: self._has_ended.is_set() or find(), within_s)
            return find()

    def check_group(self) -> None:
        """Raise AgentError if the manager has reported that a rank in the group is lost and the group must restart."""
        if self._why_group_lost is not None:
            raise AgentError(f"lost this replica group: {self._why_group_lost}; restart the group")

    def send_vote(
        self, step: int, vote: bool, quorum_id: int | None, *, wants_next: bool, limit_s: float
    ) -> Future[Decision]:
        """Send a vote. The returned future fails with a LighthouseError if the vote is refused or the watch closes.

        With `wants_next`, the answer may contain the next step's assignment. `limit_s` is how long this rank waits for
        the answer.
        """
        number, answer = next(self._numbers), Future[Decision]()
        with self._changed:
            stream = None if self._has_ended.is_set() else self._stream
            if stream is not None:
                self._votes[number] = answer
        if stream is None:
            answer.set_exception(Unreachable("the watch stream to the manager ended"))
        else:
            stream.send(Vote(number, step, vote, quorum_id, wants_next, limit_s))
        return answer

    def has_fault(self, kind: FaultKind) -> bool:
        """Return whether `lighthouse chaos` is injecting a fault of this kind at this rank."""
        return bool(self._faults) and time.monotonic() < self._faults.get(kind, 0.0)

    def end_fault(self, kind: FaultKind) -> None:
        self._faults.pop(kind, None)

    # -- on its thread

    def _follow(self, stream: Watch) -> None:
        reason = f"the manager at {self._client.address} closed the watch"
        try:
            for message in stream:
                self._receive(message, stream)
        except LighthouseError as e:
            reason = str(e)
        except Exception as e:
            log.exception("the watch of this rank failed")
            reason = f"the watch has failed: {e}"
            stream.cancel()
        self.waiting_for = ""
        with self._changed:
            unanswered, self._votes = self._votes, {}
            self._has_ended.set()
            self._has_opened.set()
            self._changed.notify_all()
        for answer in unanswered.values():
            answer.set_exception(Unreachable(reason))
        if not self.is_closing:
            if self.is_drained:
                log.info("the manager left with its group: %s", reason)
            else:
                log.warning("lost the manager: %s", reason)
            self._on_revoked(None, reason)

    def _sample(self) -> ProgressSample | None:
        """Return a sample of the progress, or None if taking it raises, so that an error does not close the watch."""
        assert self._progress is not None
        try:
            return self._progress.sample()
        except Exception:
            log.exception("cannot report the progress of this rank")
            return None

    def _receive(self, message: ToRank, stream: Watch) -> None:
        match message:
            case VoteAnswer(number, outcome):
                if (answer := self._votes.pop(number, None)) is None:
                    pass
                elif isinstance(outcome, LighthouseError):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
            case World():
                if message.pending and (self.world is None or message.pending != self.world.pending):
                    log.info("waiting to join: %s", message.joining_names)
                self.world = message
            case WatchOpened():
                if self._progress is not None:
                    stream.repeat(self._sample, SAMPLED_EVERY_S)
                self._has_opened.set()
            case Revoked(quorum_id, reason):
                with self._changed:
                    # A second message about the same quorum replaces the first if the second names the lost group.
                    if message.lost or quorum_id not in self._revoked:
                        self._revoked[quorum_id] = message
                    while len(self._revoked) > REVOKED_KEPT:
                        del self._revoked[next(iter(self._revoked))]
                    self._changed.notify_all()
                self._on_revoked(quorum_id, reason)
            case RankGone(_, reason):
                self._why_group_lost = reason
                log.error("lost this replica group: %s", reason)
                self._on_group_lost(reason)
            case Waiting(reason):
                self.waiting_for = reason
            case PreemptionChanged():
                with self._changed:
                    self.preemption = message
                    self._changed.notify_all()
            case Released():
                with self._changed:
                    self._is_released = True
                    self._changed.notify_all()
            case EvidenceAsked(number):
                stream.repeat_now()  # the decision about this rank needs its current position
                self._reporter.send_evidence(number, stream.send)
            case FaultOrder(_, kind, _, seconds):
                log.warning("lighthouse chaos: %s %s", kind, f"for up to {seconds:g} s" if seconds else "ends")
                self._faults[kind] = time.monotonic() + seconds
            case Killed(reason):
                log.error("killed by the manager: %s", reason)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
