"""An honest lighthouse as one manager meets it: what it has heard, and what it may say next."""

from dataclasses import replace

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import HoldState, QuorumOrder, QuorumPhase
from lighthouse_protocol.refusals import Drained
from tests.manager.builders import member


class DumbLighthouse:
    """`phase` is that of the quorum that was handed last."""

    def __init__(self) -> None:
        self.quorum_id = 0
        self.phase = QuorumPhase.NONE
        self.upto = 0
        self.join: session.JoinRequest | None = None
        self.drains = False
        self.has_left = False  # the group has left that quorum
        self._beats: list[tuple[int, session.HeldQuorum | None]] = []
        self._frozen_at: int | None = None
        self._stood: set[int] = set()
        self._left = False

    def stood(self, quorum_id: int) -> bool:
        return quorum_id in self._stood

    # -- what it hears

    def hear(self, message: session.ToLighthouse) -> None:
        match message:
            case session.Heartbeat(number, levels):
                self._beats.append((number, levels.held))
                self.drains = levels.drains
                if levels.held is not None and levels.held.quorum_id == self.quorum_id:
                    self._note(levels.held)
            case session.JoinRequest():
                assert self.join is None, "a join waits already"
                self.join = message
            case session.WithdrawRequest(number):
                if self.join is not None and self.join.number == number:
                    self.join = None
            case session.Leave():
                self._left, self.join = True, None
            case _:
                pass

    def _note(self, held: session.HeldQuorum) -> None:
        if held.mode is HoldState.RECALLED and self.phase is QuorumPhase.RECALLED:
            self._frozen_at = held.granted
        self.has_left = held.mode is HoldState.LEAVING
        if held.mode is HoldState.REVOKED and self.phase is not QuorumPhase.NONE:
            self.phase = QuorumPhase.REVOKED

    def lost_connection(self) -> None:
        self.join, self._beats = None, []

    # -- what it says

    def echoes(self) -> list[session.ToManager]:
        beats, self._beats = self._beats, []
        return [session.HeartbeatAck(number, 1.0, self._order_for(held)) for number, held in beats]

    def _order_for(self, held: session.HeldQuorum | None) -> QuorumOrder | None:
        if held is None:
            return None
        return self._order() if held.quorum_id == self.quorum_id else QuorumOrder(held.quorum_id, QuorumPhase.REVOKED)

    def _order(self) -> QuorumOrder:
        return QuorumOrder(self.quorum_id, self.phase, self.upto)

    def recall(self) -> list[session.ToManager]:
        if self.phase is not QuorumPhase.STANDING:
            return []
        self.phase, self._frozen_at = QuorumPhase.RECALLED, None
        return [self._order()]

    def resume(self, more: int) -> list[session.ToManager]:
        """Another member may have granted `more` steps."""
        if self.phase is not QuorumPhase.RECALLED or self._frozen_at is None:
            return []
        self.phase, self.upto = QuorumPhase.RESUMED, self._frozen_at + more
        return [self._order()]

    def revoke(self) -> list[session.ToManager]:
        if self.phase in (QuorumPhase.NONE, QuorumPhase.REVOKED):
            return []
        self.phase = QuorumPhase.REVOKED
        return [self._order()]

    def hand(self, *, stands: bool, is_behind: bool) -> list[session.ToManager]:
        """A quorum of the group and another one; one of the two may be behind."""
        if self.join is None:
            return []
        join, self.join = self.join, None
        me = join.participant
        if self.drains:
            return [session.JoinRejected(join.number, Drained(f"{me.replica_id} drains"))]
        ahead = me.step + (is_behind or me.ranks_disagree)
        messages = [] if self.phase is QuorumPhase.RESUMED else self.revoke()
        self.quorum_id += 1
        self.phase, self.upto = (QuorumPhase.STANDING if stands and me.watched else QuorumPhase.NONE), 0
        self._stood |= {self.quorum_id} if self.phase is QuorumPhase.STANDING else set()
        quorum = Quorum(self.quorum_id, (_shown(me), _shown(member("b", ahead, tag_quorum_id=me.tag_quorum_id))))
        return [*messages, session.JoinAccepted(join.number, quorum, self.phase is QuorumPhase.STANDING)]

    def dismiss(self) -> list[session.ToManager]:
        return [session.Goodbye("the group has left")] if self._left else []


def _shown(participant: Participant) -> Participant:
    return replace(participant, wire=b"")
