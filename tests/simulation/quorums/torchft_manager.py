"""torchft's manager: no session, a heartbeat, one call per step, and votes that no lighthouse sees.

It takes the place of a ManagerProcess. Its rank is the same Rank.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.refusals import Drained, Unreachable
from manager.group.requests import assign
from tests.simulation.network import LOCAL_DELAY_S, End
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.rank import Rank

BEAT_S = 0.3
RECONNECT_S = (0.1, 0.5)


@dataclass(frozen=True, slots=True)
class UnaryHeartbeat:
    replica_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class UnaryQuorum:
    number: int
    participant: Participant
    time_left_s: float


@dataclass(frozen=True, slots=True)
class UnaryCancel:
    number: int


@dataclass(frozen=True, slots=True)
class UnaryAnswer:
    number: int
    outcome: Quorum | Exception


class TorchftManager(Process):
    is_torchft = True

    def __init__(self, site: "Group", life: str) -> None:
        super().__init__(site.world, f"{site.name}.torchft", site.host)
        self.site = site
        self.life = life
        self.wire_id = f"{site.replica_id}:{life}"
        self.link: End | None = None
        self.seen_id = self.told_id = 0
        self.granted = -1
        self._asked: tuple[Rank, int, dict[str, Any]] | None = None
        self._number = 0
        self.on_death.append(self._die)
        self._connect()
        self._beat()

    def describe(self) -> str:
        return "torchft"

    def drain(self, reason: str) -> None:
        """End the process, as torchft does."""
        self.after(0, self.site.has_left, self)

    # -- the lighthouse

    def _connect(self) -> None:
        self.site.connect_to_lighthouse(self, self._connected, self._reconnect)

    def _reconnect(self) -> None:
        self.after(self.world.random.uniform(*RECONNECT_S), self._connect)

    def _connected(self, end: End) -> None:
        self.link = end
        end.on_message = self._receive
        end.on_end = self._link_ended

    def _link_ended(self) -> None:
        self.link = None
        self._reconnect()
        self._refuse(Unreachable("the lighthouse is away"))

    def _beat(self) -> None:
        if self.link is not None:
            self.link.send(UnaryHeartbeat(self.site.replica_id, self.life))
        self.after(BEAT_S, self._beat)

    def _receive(self, answer: UnaryAnswer) -> None:
        if self._asked is None or answer.number != self._number:
            return None
        if isinstance(answer.outcome, Exception):
            return self._refuse(answer.outcome)
        quorum = answer.outcome
        self.site.checkers.handed(self, quorum)
        (rank, token, fields), self._asked = self._asked, None
        assignment = assign(quorum, self.wire_id, 0, fields["init_sync"])
        assert assignment is not None
        self.site.checkers.answered(self, assignment, is_grant=False)
        return rank.after(LOCAL_DELAY_S, rank.on_quorum, token, assignment)

    def _refuse(self, error: Exception) -> None:
        if isinstance(error, Drained):  # the job has ended: its process raises, and the supervisor starts it again
            self.kill()
        elif self._asked is not None:
            (rank, token, _), self._asked = self._asked, None
            rank.after(LOCAL_DELAY_S, rank.on_refused, token, error)

    # -- the rank

    def on_watch(self, rank: "Rank") -> None:
        rank.after(LOCAL_DELAY_S, rank.on_watched, self)

    def knows(self, rank: "Rank") -> bool:
        return False

    def has_met(self, rank: "Rank") -> bool:
        return False

    def on_ask(self, rank: "Rank", token: int, time_left_s: float, fields: dict[str, Any]) -> None:
        self._asked = rank, token, fields
        self._number += 1
        if self.link is None:
            return self._refuse(Unreachable("the lighthouse is away"))
        participant = Participant(
            self.site.replica_id,
            incarnation=self.life,
            wire_id=self.wire_id,
            address=self.site.address,
            store_address=self.site.store_address,
            step=fields["step"],
            shrink_only=fields["shrink_only"],
            commit_failures=fields["commit_failures"],
        )
        return self.link.send(UnaryQuorum(self._number, participant, time_left_s))

    def on_cancel(self, rank: "Rank", token: int) -> None:
        if self._asked is not None and self._asked[1] == token:
            self._asked = None
            if self.link is not None:
                self.link.send(UnaryCancel(self._number))

    def on_vote(self, rank: "Rank", token: int, time_left_s: float, wants_next: bool, fields: dict[str, Any]) -> None:
        rank.after(LOCAL_DELAY_S, rank.on_decision, token, fields["vote"], None)

    def on_watch_end(self, watch: int) -> None:
        """Do nothing: torchft has no watches."""

    def on_rank_death(self, rank: "Rank") -> None:
        """Die with rank 0, which runs this manager in its process."""
        self.kill()

    def _die(self) -> None:
        self.site.network.end_all(self)
        for rank in self.site.ranks:
            rank.after(LOCAL_DELAY_S, rank.on_manager_gone, self)
