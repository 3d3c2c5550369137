"""A rank's watch: by it the manager knows that this rank lives and where it is, and tells it at once what it must know.

A stream on a thread of its own. A grant and its revoke travel on different streams, so revoked ids are remembered. The
end of the watch is a revoke of whatever is held.
"""

import itertools
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_client.errors import AgentError
from agent_client.progress import script_groups as self_report
from agent_client.progress.progress import Progress, ScriptProgress
from lighthouse_protocol.messages.incident import EvidenceAsked
from lighthouse_protocol.messages.membership import Decision, World
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
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.client.stream_kinds import Watch
from lighthouse_runtime.process.children import host_id, started_at

log = logging.getLogger(__name__)


# -- votes --------------------------------------------------------------------
#
# A rank's votes on their way over its watch: a message on a stream costs half of a call.


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


OPENED_WITHIN_S = 5.0
LEFT_WITHIN_S = 1.0
RELEASED_WITHIN_S = 10.0
"""How long a rank that leaves stays for peers that are still in its last step, and may read what it has sent."""
REVOKED_KEPT = 64
SAMPLED_EVERY_S = 0.5


class RankWatch:
    """`votes` go over it. The callbacks are called on the watch's thread: `on_revoked` with None
    for every quorum of before; `on_group_lost` when a rank of the group is gone for good, and what waits for it is to
    be ended. `progress`: what the manager is told of where this rank is, from the thread that sends the votes.
    `is_observer`: it tells that, and nothing else.
    """

    def __init__(
        self,
        client: ManagerClient,
        group_rank: int,
        rank_incarnation: str,
        votes: VoteChannel,
        on_revoked: Callable[[int | None, str], None],
        on_group_lost: Callable[[str], None],
        progress: Progress | ScriptProgress | None,
        *,
        is_observer: bool = False,
    ) -> None:
        self.world: World | None = None  # as it was told last; None: never
        self.waiting_for = ""  # what requests for a quorum wait for, as it was told last
        self.is_drained = False  # the group has done its last step: the manager ends, and is not lost
        self.is_closing = is_observer  # its end is no news
        self._client = client
        self._group_rank = group_rank
        self._rank_incarnation = rank_incarnation
        self._votes = votes
        self._on_revoked = on_revoked
        self._on_group_lost = on_group_lost
        self._progress = progress
        self._is_observer = is_observer
        self._looks = self_report.SelfReporter()
        self._stream: Watch | None = None
        self._has_opened = threading.Event()
        self._has_ended = threading.Event()
        self._is_released = False
        self._revoked: dict[int, Revoked] = {}
        self._is_told = threading.Condition()
        self._why_group_lost: str | None = None

    def ensure_open(self, *, wait_for_ready: bool) -> None:
        """Before the first request, so that the manager knows from the start when this rank ends."""
        if self._stream is not None and not self._has_ended.is_set():
            return
        self._has_ended.clear()
        self._has_opened.clear()
        pid = os.getpid()
        where = (host_id(), started_at(pid), socket.gethostname())
        offer = self_report.offer()
        request = WatchHello(self._group_rank, self._rank_incarnation, pid, *where, offer, self._is_observer)
        self._stream = self._client.watch(request, wait_for_ready=wait_for_ready)
        self._votes.open(self._stream)
        threading.Thread(target=self._follow, args=(self._stream,), name="lighthouse watch", daemon=True).start()
        self._has_opened.wait(OPENED_WITHIN_S)

    @property
    def is_open(self) -> bool:
        """The manager has answered, and holds it."""
        return self._has_opened.is_set() and not self._has_ended.is_set()

    def close(self, step: int | None) -> None:
        """Say that this is no failure, and stay until no peer needs this rank any more. `step` as in Leaving."""
        self.is_closing = True
        stream = self._stream
        if stream is None:
            return
        if self.is_open:
            stream.send(Leaving(step))
            stays_s = 0.0 if self._is_observer else RELEASED_WITHIN_S
            with self._is_told:
                self._is_told.wait_for(lambda: self._is_released or self._has_ended.is_set(), stays_s)
            stream.end()
            self._has_ended.wait(LEFT_WITHIN_S)
        stream.cancel()

    def give_up(self) -> None:
        """Close it without a word: another watch of this process has taken its place, or the rank starts again."""
        self.is_closing = True
        if self._stream is not None:
            self._stream.cancel()

    def wait_ended(self, within_s: float) -> None:
        self._has_ended.wait(within_s)

    def revoked(self, quorum_id: int) -> str | None:
        """Why that quorum was revoked; None: it was not."""
        told = self._revoked.get(quorum_id)
        return told.reason if told is not None else None

    def why_lost(self, quorum_id: int, within_s: float) -> Revoked | None:
        """The group that this quorum has lost, and why; None: none is named in that time, or the watch has ended."""
        with self._is_told:
            self._is_told.wait_for(lambda: self._has_ended.is_set() or self._names(quorum_id), within_s)
        return self._revoked[quorum_id] if self._names(quorum_id) else None

    def _names(self, quorum_id: int) -> bool:
        told = self._revoked.get(quorum_id)
        return told is not None and bool(told.lost)

    def check_group(self) -> None:
        """Raises AgentError if a rank of the group is gone for good."""
        if self._why_group_lost is not None:
            raise AgentError(f"lost this replica group: {self._why_group_lost}; restart the group")

    # -- on its thread

    def _follow(self, stream: Watch) -> None:
        reason = f"the manager at {self._client.address} closed the watch"
        try:
            for message in stream:
                self._take(message, stream)
        except LighthouseError as e:
            reason = str(e)
        self._votes.end(Unreachable(reason))
        self.waiting_for = ""
        with self._is_told:
            self._has_ended.set()
            self._is_told.notify_all()
        self._has_opened.set()
        if not self.is_closing:
            if self.is_drained:
                log.info("the manager left with its group: %s", reason)
            else:
                log.warning("lost the manager: %s", reason)
            self._on_revoked(None, reason)

    def _sample(self) -> ProgressSample | None:
        """A defect in the sample does not end the watch."""
        assert self._progress is not None
        try:
            return self._progress.sample()
        except Exception:
            log.exception("cannot report the progress of this rank")
            return None

    def _note(self, revoked: Revoked) -> None:
        """What names the group that was lost may come after the news itself."""
        with self._is_told:
            if revoked.lost or revoked.quorum_id not in self._revoked:
                self._revoked[revoked.quorum_id] = revoked
            while len(self._revoked) > REVOKED_KEPT:
                del self._revoked[next(iter(self._revoked))]
            self._is_told.notify_all()

    def _take(self, message: ToRank, stream: Watch) -> None:
        match message:
            case VoteAnswer():
                self._votes.take(message)
            case World():
                if message.pending and (self.world is None or message.pending != self.world.pending):
                    log.info("waiting to join: %s", message.joining_names)
                self.world = message
            case WatchOpened():
                if self._progress is not None:
                    stream.repeat(self._sample, SAMPLED_EVERY_S)
                self._has_opened.set()
            case Revoked(quorum_id, reason):
                self._note(message)
                self._on_revoked(quorum_id, reason)
            case RankGone(_, reason):
                self._why_group_lost = reason
                log.error("lost this replica group: %s", reason)
                self._on_group_lost(reason)
            case Waiting(reason):
                self.waiting_for = reason
            case Released():
                with self._is_told:
                    self._is_released = True
                    self._is_told.notify_all()
            case EvidenceAsked(number):
                stream.repeat_now()  # what is done about it is decided by where it is now
                self._looks.answer(number, stream.send)
            case Killed(reason):
                log.error("killed by the manager: %s", reason)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
