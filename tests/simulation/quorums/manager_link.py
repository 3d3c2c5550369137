"""A manager's link to the lighthouse (manager.group.driver.Link): one session, opened again for as long as it runs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.session import (
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    Leave,
    QuorumChanged,
    ToLighthouse,
    Welcome,
)
from lighthouse_protocol.refusals import Superseded, Unreachable
from tests.simulation.network import End

if TYPE_CHECKING:
    from tests.simulation.quorums.manager import ManagerProcess

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
CLOSES_AFTER_S = (0.002, 0.02, 0.3)


class ManagerLink:
    """`end`: of the connection that the session is on."""

    def __init__(self, manager: "ManagerProcess") -> None:
        self.end: End | None = None
        self.error = ""
        self._manager = manager
        self._left_behind: list[End] = []  # until the next welcome
        self._is_connecting = self._wants_another = self._is_leaving = False
        self._backoff_s = FIRST_BACKOFF_S

    # -- for the driver

    def send(self, message: ToLighthouse) -> None:
        self._is_leaving |= isinstance(message, Leave)
        if self.end is not None:
            self.end.send(message)
            if isinstance(message, JoinRequest):
                self._close_under(self.end)

    def _close_under(self, end: End) -> None:
        """The connection may break while the lighthouse has the join, or while its answer is on its way."""
        world, share = self._manager.world, self._manager.site.plan.closes
        if share and not world.is_calm and world.random.random() < share:
            world.counts["sessions closed under a join"] += 1
            world.after(world.random.choice(CLOSES_AFTER_S) * world.random.random(), self._break, end)

    def _break(self, end: End) -> None:
        if end.is_open:
            self._manager.site.network.break_(end)

    def give_up(self, reason: str) -> None:
        self._manager.say(f"gives its session up: {reason}")
        end, self.end = self.end, None
        self._wants_another = False
        if end is not None:
            end.close()
            self._manager.after(0, self._closed)

    def connect_second(self, reason: str) -> None:
        self._wants_another = True
        self._try_beside()

    def cancel_second(self) -> None:
        self._wants_another = False

    # -- the network

    def connect(self) -> None:
        self._manager.site.connect_to_lighthouse(self._manager, self._connected, self._connect_later)

    def _connect_later(self) -> None:
        self.error = "unreachable"
        delay_s = self._backoff_s * self._manager.world.random.uniform(0.5, 1)
        self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)
        self._manager.after(delay_s, self.connect)

    def _connected(self, end: End) -> None:
        self._wants_another = False
        self.end = end
        end.on_message = lambda message: self._receive(end, message)
        end.on_end = lambda: self._ended(end)
        self._manager.driver.opened()

    def _receive(self, end: End, message: Any) -> None:
        if end is not self.end:
            return
        self.error = ""
        if isinstance(message, Welcome):
            behind, self._left_behind = self._left_behind, []
            for older in behind:
                older.close()
        if isinstance(message, JoinAccepted | QuorumChanged):
            self._answer_back(message)
        if isinstance(message, JoinAccepted):
            self._manager.was_handed(message)
        if isinstance(message, JoinRejected):
            self._manager.say(f"is refused: {message.error}")
            if not message.join and isinstance(message.error, Unreachable | Superseded):
                return  # of a session, and for now: it is opened again
        else:
            self._backoff_s = FIRST_BACKOFF_S
        if isinstance(message, QuorumChanged):
            self._receive_change(message)
        else:
            self._manager.driver.received(message)

    def _answer_back(self, message: JoinAccepted | QuorumChanged) -> None:
        """With a quorum of an earlier id, before."""
        manager = self._manager
        quorum = message.quorum if isinstance(message, JoinAccepted) else manager.handed
        if manager.site.is_answered_back and manager.told_id and quorum is not None:
            manager.site.is_answered_back = False
            lower = replace(quorum, quorum_id=manager.told_id - 1)
            manager.driver.received(JoinAccepted(message.join, lower, message.stands, message.secret))

    def _receive_change(self, message: QuorumChanged) -> None:
        """What counts is the quorum that the manager makes of it, if it has waited for it."""
        session = self._manager.machine.session
        before = session.known
        self._manager.driver.received(message)
        if session.known is None:
            self._manager.world.counts["changes that were not taken"] += 1
        elif session.known is not before:
            quorum = session.known.quorum
            self._manager.was_handed(JoinAccepted(message.join, quorum, message.stands, message.secret))

    def _ended(self, end: End) -> None:
        if end is self.end:
            self.end = None
            self._wants_another = False
            self._manager.say("has lost its session")
            self._closed()

    def _closed(self) -> None:
        self._manager.driver.closed()
        if not self._is_leaving:
            self._connect_later()

    # -- a second connection beside the first

    def _try_beside(self) -> None:
        if self._wants_another and not self._is_connecting:
            self._is_connecting = True
            self._manager.site.connect_to_lighthouse(self._manager, self._connected_beside, self._failed_beside)

    def _failed_beside(self) -> None:
        self._is_connecting = False
        self._manager.after(FIRST_BACKOFF_S, self._try_beside)

    def _connected_beside(self, end: End) -> None:
        self._is_connecting = False
        if self.end is None or not self._wants_another:
            return end.close()
        self._manager.say("moves its session to another connection")
        self._manager.world.counts["sessions moved"] += 1
        self._left_behind.append(self.end)
        self.end = None
        self._manager.driver.closed()
        return self._connected(end)
