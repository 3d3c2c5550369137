"""Checks of what a manager may do, by what it has sent and received: S2 to S4 as one manager alone can break them.

Nothing here computes what the product computes. The checks read messages, in the world's time.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from lighthouse_protocol.messages.membership import Assignment, Decision
from lighthouse_protocol.messages.session import (
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRequest,
    QuorumChanged,
    QuorumOrder,
    QuorumPhase,
    Revoked,
    Welcome,
)
from manager.group import events
from manager.group.events import PendingVote, QuorumRequest
from tests.simulation.checks import Checks
from tests.simulation.world import MAX_RATE, violated

if TYPE_CHECKING:
    from tests.simulation.quorums.manager import ManagerProcess

Votes = dict[tuple[int, int], dict[int, bool]]
"""By quorum_id and step, those of the ranks that have lived together."""

STOPPED = (HoldState.JOINING, HoldState.LEAVING, HoldState.REVOKED)
SLACK_S = 1e-3


@dataclass(slots=True)
class _Held:
    """A quorum that the manager holds. `over` is the reason why it may grant no further step."""

    formed_for: int
    stands: bool
    granted: int
    over: str = ""
    is_recalled: bool = False
    upto: int | None = None
    committed: set[int] = field(default_factory=set[int])


class ManagerChecks(Checks):
    def __init__(self, process: "ManagerProcess") -> None:
        self._process = process
        self._world = process.world
        self._size = process.site.size
        self._sent_at: dict[int, float] = {}
        self._backed_until = self._renewed_until = 0.0  # by all answers; by the newest one
        self._asks: dict[int, QuorumRequest] = {}  # those that wait
        self._pushed: set[tuple[int, bool, tuple[int, ...]]] = set()
        self._stands: dict[int, bool] = {}
        self._held: dict[int, _Held] = {}
        self._calls: dict[int, tuple[int, int, int, Votes]] = {}

    # -- what happens

    def before(self, event: events.Event | None, now: float) -> None:
        match event:
            case events.Received(message):
                self._hear(message)
            case QuorumRequest() if event.group_rank < self._size:
                self._asks[event.call] = event
            case events.CallEnded(call) | events.CallExpired(call):
                self._asks.pop(call, None)
            case PendingVote() as voted if voted.quorum_id is not None and voted.group_rank < self._size:
                key, votes = (voted.quorum_id, voted.step), self._process.votes
                self._calls[voted.call] = *key, voted.group_rank, votes
                votes.setdefault(key, {})[voted.group_rank] = voted.vote
            case _:
                pass

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Sent(message):
                self._say(message)
            case events.QuorumAnswered(call, assignment, quorum):
                self._let_in(assignment, is_grant=quorum is None, ask=self._asks.get(call))
                self._asks.pop(call, None)
            case events.CallRefused(call):
                self._asks.pop(call, None)
            case events.Pushed(Revoked(quorum_id, _, lost), watches) if watches:
                if (quorum_id, bool(lost), watches) in self._pushed:
                    self._break("S7", f"tells its ranks again that quorum {quorum_id} is revoked")
                self._pushed.add((quorum_id, bool(lost), watches))
            case events.VoteAnswered(call, Decision(commit, following)):
                self._decide(call, commit=commit)
                if following is not None:
                    self._let_in(following, is_grant=True)
            case _:
                pass

    # -- words

    def _hear(self, message: Any) -> None:
        match message:
            case JoinAccepted(_, quorum, stands):
                self._stands[quorum.quorum_id] = stands
            case QuorumChanged(_, change, stands):
                self._stands[change.quorum_id] = stands
            case HeartbeatAck(number, _, order):
                self._obey(order)
                lease_s = self._lease_s()
                if (sent_at := self._sent_at.pop(number, None)) is not None and lease_s is not None:
                    self._renewed_until = sent_at + lease_s / MAX_RATE
                    self._backed_until = max(self._backed_until, self._renewed_until)
            case Welcome(_, _, order):
                self._obey(order)
            case QuorumOrder():
                self._obey(message)
            case _:
                pass

    def _lease_s(self) -> float | None:
        """Return the lease of the lighthouse that answers, in seconds."""
        link = self._process.link
        config = getattr(link.peer.process, "config", None) if link is not None else None
        return config.lease_s if config is not None else None

    def _obey(self, order: QuorumOrder | None) -> None:
        held = self._held.get(order.quorum_id) if order is not None else None
        if held is None or order is None:
            return
        match order.phase:
            case QuorumPhase.REVOKED:
                held.over = held.over or "it was revoked"
            case QuorumPhase.RECALLED:
                held.is_recalled = True
            case QuorumPhase.RESUMED:
                held.upto = order.upto
            case _:
                pass

    def _say(self, message: Any) -> None:
        match message:
            case Heartbeat(number, levels, _):
                self._sent_at[number] = self._world.now
                self._report(levels)
            case Hello(_, levels):
                self._report(levels)
            case JoinRequest():
                for held in self._held.values():
                    held.over = held.over or "the group has asked for the next one"
            case _:
                pass

    def _report(self, levels: GroupReport) -> None:
        held = self._held.get(levels.held.quorum_id) if levels.held is not None else None
        if held is None or levels.held is None:
            return
        mode, granted = levels.held.mode, levels.held.granted
        if mode not in STOPPED and granted != held.granted:
            self._break("S6", f"reports {granted} as its highest grant, and that is {held.granted}")
        if mode in STOPPED:
            held.over = held.over or f"the manager has said that it is {mode}"

    # -- steps

    def _let_in(self, assignment: Assignment, *, is_grant: bool, ask: QuorumRequest | None = None) -> None:
        quorum_id, step = assignment.quorum_id, assignment.max_step
        if not is_grant:
            stands = self._stands.get(quorum_id, False)
            known = self._held.get(quorum_id)
            if known is None or known.formed_for != step:
                self._held[quorum_id] = _Held(step, stands, step)
                if silent := set(range(self._size)) - {ask.group_rank for ask in self._asks.values()}:
                    self._break(
                        "S4", f"lets ranks into quorum {quorum_id}, for which ranks {sorted(silent)} do not ask"
                    )
                if stands:
                    self._backed_until = self._renewed_until  # an earlier lighthouse may have given a longer lease
                    self._check_lease(quorum_id, step)
            return
        held = self._held.get(quorum_id)
        if assignment.revoked or (held is not None and step <= held.granted):
            return
        where = f"step {step} of quorum {quorum_id}"
        if held is None or not held.stands:
            self._break("S3", f"grants {where}, which does not stand")
        if held.over:
            self._break("S3", f"grants {where}, though {held.over}")
        if held.upto is not None and step > held.upto:
            self._break("S6", f"grants {where}, and that was resumed up to {held.upto}")
        if held.is_recalled and held.upto is None:
            self._break("S6", f"grants {where}, which is recalled")
        if step != held.granted + 1:
            self._break("S4", f"grants {where} after step {held.granted}")
        if held.granted not in held.committed:
            self._break("S4", f"grants {where} before step {held.granted} was committed")
        if ask is not None and (ask.commit_failures or ask.distrust is not None):
            self._break("S4", f"grants {where} to rank {ask.group_rank}, which has failed, or holds no state")
        self._check_lease(quorum_id, step)
        held.granted = step

    def _check_lease(self, quorum_id: int, step: int) -> None:
        late_s = self._world.now - self._backed_until
        if late_s > SLACK_S:
            self._break("S3", f"grants step {step} of quorum {quorum_id} {late_s:.3f} s after its lease may have ended")

    def _decide(self, call: int, *, commit: bool) -> None:
        quorum_id, step, group_rank, heard = self._calls.pop(call, (0, 0, 0, {}))
        if not commit or not quorum_id:
            return
        votes = heard[quorum_id, step]
        noes = [rank for rank, vote in votes.items() if not vote]
        silent = set(range(self._size)) - votes.keys()
        if noes or silent:
            said = f"ranks {sorted(noes)} voted no, ranks {sorted(silent)} not at all"
            self._break("S4", f"tells rank {group_rank} to commit step {step} of quorum {quorum_id}; {said}")
        if (held := self._held.get(quorum_id)) is not None:
            held.committed.add(step)

    def _break(self, rule: str, text: str) -> NoReturn:
        violated(rule, f"{self._process.name} {text}")
