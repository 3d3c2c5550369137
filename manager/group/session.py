"""The manager's side of its session with the lighthouse. This module does no I/O.

`SessionMachine` decides when to send hellos, heartbeats and joins, and when to give up the connection.
`ProgressReporter` decides which heartbeats carry the progress of the ranks.

1. A pending join outlives its connection, because the next session sends it again. Everything else is state that each
   hello and heartbeat repeats.
2. The *lease* is the time for which the group may train without an answer from the lighthouse. An acknowledged
   heartbeat renews it, counted from when the heartbeat was sent, not from when its answer arrived.
3. If a heartbeat is not answered within one and a half intervals, the session is *silent*. The manager then opens a
   second connection, in case only the first one is broken, and the session moves there. The first connection closes
   only after the lighthouse has accepted the second, so no group is lost when the lighthouse itself was paused.
4. After a whole lease without an answer, the manager gives up the session and opens a new one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, RankView
from lighthouse_protocol.rules.quorum_change import NamedQuorum, apply_change

MIN_INTERVAL_S = 0.9  # minimum interval between two views; less than the usual heartbeat interval
REPEATED_S = 4.0  # interval after which an unchanged view is repeated; less than stall.SILENT_S


class ProgressReporter:
    """Decides which heartbeats carry the progress of the ranks.

    A heartbeat carries the progress if it has changed, or if REPEATED_S have passed, to show that the ranks are alive.
    Progress alone causes no additional heartbeat. `view` returns the progress at a given time.
    """

    def __init__(self, view: Callable[[float], GroupView]) -> None:
        self._view = view
        self._reported: GroupView | None = None
        self._sent_at = 0.0

    def begin(self) -> None:
        """Begin a session. Its first heartbeat carries the progress."""
        self._reported = None

    def next_view(self, now: float) -> GroupView | None:
        """Return the progress for a heartbeat that is sent now, or None if the heartbeat should not carry it."""
        if self._reported is not None and now < self._sent_at + MIN_INTERVAL_S:
            return None
        view = self._view(now)
        before = self._reported.ranks if self._reported is not None else ()
        is_same = [_comparable(rank) for rank in view.ranks] == [_comparable(rank) for rank in before]
        if is_same and (not view.ranks or now < self._sent_at + REPEATED_S):
            return None
        self._reported, self._sent_at = view, now
        return view


def _comparable(rank: RankView) -> tuple[object, ...]:
    """Return the parts of a rank's progress that do not change merely because time passes."""
    sample = rank.sample
    phases = [(phase.name, phase.done) for phase in sample.phases]
    heal = sample.heal and (sample.heal.number, sample.heal.received, sample.heal.is_over)
    where = sample.collective, sample.calls, sample.waits_for, sample.at, heal
    return rank.name, rank.rank_incarnation, sample.step, phases, where


FIRST_HEARTBEAT_INTERVAL_S = 1.0
FIRST_LEASE_S = 5.0
SILENT_AFTER_INTERVALS = 1.5
_URGENT = (session.HoldState.RECALLED, session.HoldState.LEAVING, session.HoldState.REVOKED)


@dataclass(slots=True)
class _Join:
    number: int
    participant: Participant
    deadline_at: float


class SessionMachine:
    """State machine of the manager's sessions with the lighthouse.

    `progress` supplies the progress of the ranks for heartbeats. `secret` is a random string by which the lighthouse
    recognizes this manager when it opens another session.
    """

    def __init__(self, progress: ProgressReporter | None = None, secret: str = "") -> None:
        self._secret = secret
        self._progress = progress
        self.is_open = False
        self.lease_s = FIRST_LEASE_S
        self._interval_s = FIRST_HEARTBEAT_INTERVAL_S
        self._heartbeats = 0
        self._joins = 0
        self._sent_at: dict[int, float] = {}
        self._next_heartbeat_at = 0.0
        self._received_at = 0.0
        self._unanswered = 0  # consecutive sessions without any answer
        self._is_silent = False  # the last value that `silence_change` returned
        self._reported = session.GroupReport()
        self._entered = (0, 0)  # id of the held quorum, and its first step
        self._join: _Join | None = None
        self.known: NamedQuorum | None = None  # last received quorum; the lighthouse may send only changes to it

    @property
    def is_joining(self) -> bool:
        """True if a join is waiting for its answer."""
        return self._join is not None

    def open_session(self, me: Participant, report: session.GroupReport, now: float) -> list[session.ToLighthouse]:
        self.is_open = True
        self._sent_at = {}
        self._received_at = now
        self._unanswered += 1
        self._is_silent = False
        if self._progress is not None:
            self._progress.begin()
        messages: list[session.ToLighthouse] = [
            session.Hello(me, report, self._secret),
            self._heartbeat(report, now),
        ]
        if self._join is not None:
            messages.append(self._request(self._join, now))
        return messages

    def close_session(self) -> None:
        self.is_open = False

    def tick(self, report: session.GroupReport, now: float) -> list[session.ToLighthouse]:
        """Return a heartbeat if one is due, or if `report` contains a change for which the lighthouse is waiting."""
        if report.held is not None and self._entered[0] != report.held.quorum_id:
            self._entered = (report.held.quorum_id, report.held.granted)
        is_due = now >= self._next_heartbeat_at or (
            report is not self._reported and (_is_urgent(report, self._reported) or self._is_first_commit(report.held))
        )
        return [self._heartbeat(report, now)] if self.is_open and is_due else []

    def is_given_up(self, now: float) -> bool:
        return self.is_open and now >= self._received_at + self.lease_s

    def deadline(self) -> float | None:
        if not self.is_open:
            return None
        moments = [self._next_heartbeat_at, self._received_at + self.lease_s]
        return min(moments if self._is_silent else [*moments, self._silent_at])

    def silence_change(self, now: float) -> bool | None:
        """Return True if the lighthouse has become silent, False if it no longer is, or None if nothing has changed."""
        is_silent = self.is_open and bool(self._sent_at) and now >= self._silent_at
        if is_silent is self._is_silent:
            return None
        self._is_silent = is_silent
        return is_silent

    @property
    def _silent_at(self) -> float:
        """Time from which the lighthouse counts as silent if it has not answered by then.

        The time that an answer may take doubles with each consecutive session in which the lighthouse did not reply.
        """
        asked_at = next(iter(self._sent_at.values()), math.inf)
        patience_s = SILENT_AFTER_INTERVALS * self._interval_s * 2 ** max(0, min(self._unanswered, 10) - 1)
        return max(asked_at, self._received_at) + patience_s

    def handle_welcome(self, welcome: session.Welcome, now: float) -> None:
        self._received_at, self._unanswered = now, 0
        self._interval_s, self.lease_s = welcome.heartbeat_interval_s, welcome.lease_s
        self._next_heartbeat_at = min(self._next_heartbeat_at, now + self._interval_s)

    def handle_ack(self, ack: session.HeartbeatAck, now: float) -> float | None:
        """Record an acknowledgement. Return when its heartbeat was sent, or None if that heartbeat is unknown."""
        self._received_at, self._unanswered = now, 0
        self._interval_s = ack.heartbeat_interval_s
        sent_at = self._sent_at.pop(ack.number, None)
        while self._sent_at and (oldest := next(iter(self._sent_at))) < ack.number:
            del self._sent_at[oldest]
        return sent_at

    # -- joins

    def join(self, participant: Participant, deadline_at: float, now: float) -> list[session.ToLighthouse]:
        self._joins += 1
        self._join = _Join(self._joins, participant, deadline_at)
        return [self._request(self._join, now)] if self.is_open else []

    def withdraw(self) -> list[session.ToLighthouse]:
        join, self._join = self._join, None
        return [session.WithdrawRequest(join.number)] if join is not None and self.is_open else []

    def is_waiting(self, number: int) -> bool:
        return self._join is not None and self._join.number == number

    def end_join(self, number: int) -> bool:
        """End the pending join with this number. Return False if no join with this number is pending."""
        is_ours = self.is_waiting(number)
        if is_ours:
            self._join = None
        return is_ours

    def full_answer(self, answer: session.JoinAccepted | session.QuorumChanged) -> session.JoinAccepted | None:
        """Return the answer to a join, with the full quorum. If `answer` contains only changes, apply them first.

        Return None if the changes apply to a different quorum. The caller must then call `request_full`.
        """
        if isinstance(answer, session.JoinAccepted):
            self.known = NamedQuorum.of(answer.quorum)
            return answer
        made = apply_change(self.known.quorum, answer.change) if self.known is not None else None
        self.known = made
        if made is None:
            return None
        return session.JoinAccepted(answer.join, made.quorum, answer.stands, answer.secret)

    def request_full(self, now: float) -> list[session.ToLighthouse]:
        """Repeat the join, if one is pending, so that the lighthouse sends the full quorum."""
        if self._join is None:
            return []
        return self.join(self._join.participant, self._join.deadline_at, now)

    def leave(self, reason: str) -> list[session.ToLighthouse]:
        return [session.Leave(reason)] if self.is_open else []

    # -- internal

    def _heartbeat(self, report: session.GroupReport, now: float) -> session.Heartbeat:
        self._heartbeats += 1
        self._sent_at[self._heartbeats] = now
        self._next_heartbeat_at = now + self._interval_s
        self._reported = report
        progress = self._progress.next_view(now) if self._progress is not None else None
        return session.Heartbeat(self._heartbeats, self._reported, progress)

    def _is_first_commit(self, held: session.HeldQuorum | None) -> bool:
        """Return whether the quorum's first step is committed and no heartbeat has reported this yet.

        The lighthouse takes this as the sign that training continues under the quorum.
        """
        last, first = self._reported.held, self._entered[1]
        if held is None or held.granted <= first:
            return False
        return last is None or (last.quorum_id, last.granted) <= (held.quorum_id, first)

    def _request(self, join: _Join, now: float) -> session.JoinRequest:
        held = self.known.digest if self.known is not None else ""
        return session.JoinRequest(join.number, join.participant, max(0.001, join.deadline_at - now), held)


def _is_urgent(report: session.GroupReport, reported: session.GroupReport) -> bool:
    """Return whether the lighthouse needs the report before the next regular heartbeat.

    New grants can wait, and so can a new mode that the lighthouse has ordered or that a join implies.
    """
    held = report.held
    is_held = held is not None and held.mode in _URGENT and held != reported.held
    is_wanted = _wanted(held) not in (None, _wanted(reported.held))
    return is_held or is_wanted or (report.drains, report.down) != (reported.drains, reported.down)


def _wanted(held: session.HeldQuorum | None) -> int | None:
    """Return the id of the group's quorum if the group needs to replace that quorum, otherwise None."""
    return held.quorum_id if held is not None and held.wants_next else None
