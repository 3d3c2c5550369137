"""A manager: the product's GroupDriver on a virtual clock, its link to the lighthouse, and the calls of its ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.membership import Assignment, Decision, Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import (
    EvidenceDone,
    EvidenceRequest,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    Leave,
    Leaving,
    QuorumChanged,
    RankGone,
    Released,
    Revoked,
    ToLighthouse,
    WatchHello,
    Welcome,
)
from lighthouse_protocol.refusals import LighthouseError, Superseded, Unreachable
from lighthouse_runtime.timing.timers import LoopLag
from manager.group.driver import GroupDriver, Outcome
from manager.group.events import GroupGivenUp, GroupLeft, Killed, RankGivenUp
from manager.group.machine import GroupMachine
from tests.simulation.checks import observe
from tests.simulation.network import LOCAL_DELAY_S, End
from tests.simulation.quorums.manager_checks import ManagerChecks
from tests.simulation.world import MIN_RATE, Died, Process, Timers, Violation

if TYPE_CHECKING:
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.rank import Rank

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
CLOSES_AFTER_S = (0.002, 0.02, 0.3)
NOTICE_S = (0.001, 0.05)
EVIDENCE_TAKES_S = 0.05
DISCARDED_WITHIN_S = 0.3
VANISHED_NOTICE_S = (1.0, 2.0)  # by its keepalive


class ManagerProcess(Process):
    is_torchft = False

    def __init__(self, site: "Group", life: str) -> None:
        super().__init__(site.world, f"{site.name}.manager", site.host)
        self.site = site
        self.life = life
        self.seen_id = self.told_id = 0
        self.granted = -1
        self.handed: Quorum | None = None  # the last one
        self.accepted: JoinAccepted | None = None  # the message that it came in
        me = Participant(
            site.replica_id,
            address=site.address,
            store_address=site.store_address,
            group_world_size=site.size,
        )
        self._calls: dict[tuple[Rank, int], int] = {}
        self._answered: set[tuple[Rank, int]] = set()  # since a call began last
        self._watching: dict[int, Rank] = {}
        self._met: set[Rank] = set()
        self._gone: set[int] = set()
        self.dies_in: int | None = None  # after so many answers
        self.votes = site.votes  # those of the ranks whose vote was heard last
        self._voting: dict[tuple[Rank, int], tuple[int, int]] = {}
        self._has_ended = False
        self._link = ManagerLink(self)
        self.secret = f"known to {life} of {site.name} alone"
        timers, evidence = Timers(self), Evidence(self)
        lag = LoopLag(timers)
        options: dict[str, Any] = {"secret": self.secret, "lag": lag}
        self.driver = GroupDriver(me, life, timers, self._link, evidence, self._handle, **options)
        lag.watch()
        observe(self.machine, ManagerChecks(self))
        self.on_death.append(self._die)
        self._link.connect()

    @property
    def machine(self) -> GroupMachine:
        return self.driver.machine

    @property
    def link(self) -> End | None:
        return self._link.end

    @property
    def incarnation(self) -> str:
        return self.machine.incarnation

    def was_handed(self, message: JoinAccepted) -> None:
        self.accepted, self.handed = message, message.quorum
        self.site.checkers.handed(self, message.quorum)

    def tell_lighthouse(self, message: Any) -> None:
        self._link.send(message)

    def describe(self) -> str:
        held = self.machine.held
        return f"{held.mode} {held.quorum_id}" if held else "holds nothing"

    # -- calls of ranks

    def on_ask(self, rank: "Rank", token: int, time_left_s: float, fields: dict[str, Any]) -> None:
        call = self.driver.ask(AskReply(self, rank, token), time_left_s, **fields)
        self._begin(rank, token, call, time_left_s)

    def on_vote(self, rank: "Rank", token: int, time_left_s: float, wants_next: bool, fields: dict[str, Any]) -> None:
        self._voting[rank, token] = fields["quorum_id"], fields["step"]
        self.votes = rank.votes
        call = self.driver.vote(VoteReply(self, rank, token), time_left_s, wants_next=wants_next, **fields)
        self._begin(rank, token, call, time_left_s)

    def _begin(self, rank: "Rank", token: int, call: int, time_left_s: float) -> None:
        if (rank, token) not in self._answered:  # at once
            self._calls[rank, token] = call
            self.after(time_left_s / MIN_RATE, self._check_answered, rank, token)
        self._answered.clear()
        if not rank.is_up:
            self.after(LOCAL_DELAY_S, self.on_cancel, rank, token)

    def _check_answered(self, rank: "Rank", token: int, *, is_last: bool = False) -> None:
        """Check that a call gets its answer in time.

        A pause of this process may bring this check before the call's own timer, so it looks twice.
        """
        if (rank, token) in self._calls and not is_last:
            self.after(0, partial(self._check_answered, is_last=True), rank, token)
        elif (rank, token) in self._calls:
            raise Violation(f"S5 {self.name} leaves a call of {rank.name} without an answer for longer than it has")

    def on_cancel(self, rank: "Rank", token: int) -> None:
        """End a call that was cancelled or whose connection broke."""
        self._voting.pop((rank, token), None)
        if (call := self._calls.pop((rank, token), None)) is not None:
            self.driver.end_call(call)

    # -- watches of ranks

    def on_watch(self, rank: "Rank") -> None:
        if not rank.is_up:
            return
        request = WatchHello(rank.group_rank, rank.rank_incarnation)
        rank.watch = self.driver.open_watch(request, WatchPeer(self, rank), is_local=True)
        self._watching[rank.watch] = rank
        self._met.add(rank)
        rank.after(LOCAL_DELAY_S, rank.on_watched, self)

    def knows(self, rank: "Rank") -> bool:
        return rank in self._watching.values()

    def has_met(self, rank: "Rank") -> bool:
        return rank in self._met

    def on_leaving(self, rank: "Rank", step: int | None) -> None:
        self.driver.receive(rank.watch, Leaving(step))

    def on_watch_end(self, watch: int) -> None:
        if self._watching.pop(watch, None) is not None:
            self.driver.end_watch(watch)

    def on_rank_death(self, rank: "Rank") -> None:
        """Close the connections of a dead rank, in any order."""
        soon_s = VANISHED_NOTICE_S if rank.has_vanished else NOTICE_S
        notice_s = self.world.random.uniform(*soon_s)
        for watch, watched in list(self._watching.items()):
            if watched is rank:
                self.after(notice_s, self.on_watch_end, watch)
        for caller, token in list(self._calls):
            if caller is rank:
                self.after(self.world.random.uniform(*soon_s), self.on_cancel, rank, token)
        if not self.site.has_lost_manager:
            waiting = [vote for vote, what in self._voting.items() if rank.group_rank not in rank.votes.get(what, {})]
            self.after(soon_s[1] + DISCARDED_WITHIN_S, self._check_votes, rank, waiting)

    def _check_votes(self, rank: "Rank", waiting: list[tuple["Rank", int]], *, is_last: bool = False) -> None:
        """Check that no vote waits for a rank that died without a vote. This looks twice, like `_check_answered`."""
        left = [mate.name for mate, token in waiting if (mate, token) in self._voting and mate.is_up]
        if left and not is_last:
            self.after(0, partial(self._check_votes, is_last=True), rank, waiting)
        elif left:
            raise Violation(f"S7 {self.name} lets {left} wait for the vote of {rank.name}, which is lost")

    def tell_gone(self, group_rank: int, to: "Rank", reason: str) -> None:
        self._gone.add(group_rank)
        to.after(LOCAL_DELAY_S, to.on_mate_gone, reason)

    def check_gone(self, rank: "Rank", patience_s: float, *, is_last: bool = False) -> None:
        """Check that the other ranks of the group are notified of a loss in time.

        A pause of the manager stops the time. This looks twice, like `_check_answered`.
        """
        waiting = [mate for mate in self.site.ranks if mate.is_up and mate.began_at <= rank.began_at]
        if rank not in self.site.ranks or not waiting or rank.group_rank in self._gone:
            return None
        if patience_s > 0:
            return self.after(min(1.0, patience_s), self.check_gone, rank, patience_s - 1.0)
        if not is_last:
            return self.after(0, partial(self.check_gone, is_last=True), rank, patience_s)
        raise Violation(f"S7 {self.name} has not told {[mate.name for mate in waiting]} that {rank.name} is gone")

    def reply(self, rank: "Rank", token: int, method: str, *args: Any) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                self.site.crash_manager()
        self.world.sends(self.name, rank.name, (method, *args))
        self._answered.add((rank, token))
        self._voting.pop((rank, token), None)
        self._calls.pop((rank, token), None)
        delay_s = LOCAL_DELAY_S * self.world.random.uniform(0.3, 3)
        rank.after(delay_s, getattr(rank, method), token, *args)

    # -- its end

    def drain(self, reason: str) -> None:
        self.driver.drain(reason)

    def _handle(self, outcome: Outcome) -> None:
        if self._has_ended or isinstance(outcome, RankGivenUp | GroupGivenUp):
            return
        self._has_ended = True
        self.log(f"ends with status {int(isinstance(outcome, Killed))}")
        if isinstance(outcome, GroupLeft):
            self.after(0, self.site.has_left, self)
            return
        self.site.kill()
        raise Died

    def _die(self) -> None:
        self.site.network.end_all(self)
        for rank in self.site.ranks:
            rank.after(self.world.random.uniform(*NOTICE_S), rank.on_manager_gone, self)


class ManagerLink:
    """The manager's session with the lighthouse, reopened while the manager runs. `end` is its present connection."""

    def __init__(self, manager: ManagerProcess) -> None:
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
        """Break the connection while the lighthouse has the join, or while its answer is in transit."""
        world, share = self._manager.world, self._manager.site.plan.closes
        if share and not world.is_calm and world.random.random() < share:
            world.counts["sessions closed under a join"] += 1
            world.after(world.random.choice(CLOSES_AFTER_S) * world.random.random(), self._break, end)

    def _break(self, end: End) -> None:
        if end.is_open:
            self._manager.site.network.break_(end)

    def give_up(self, reason: str) -> None:
        self._manager.log(f"gives its session up: {reason}")
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
        self._manager.driver.begin_session()

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
            self._manager.log(f"is refused: {message.error}")
            if not message.join and isinstance(message.error, Unreachable | Superseded):
                return  # of a session, and for now: it is opened again
        else:
            self._backoff_s = FIRST_BACKOFF_S
        if isinstance(message, QuorumChanged):
            self._receive_change(message)
        else:
            self._manager.driver.handle_message(message)

    def _answer_back(self, message: JoinAccepted | QuorumChanged) -> None:
        """Receive an answer with a lower quorum_id before the real one."""
        manager = self._manager
        quorum = message.quorum if isinstance(message, JoinAccepted) else manager.handed
        if manager.site.is_answered_back and manager.told_id and quorum is not None:
            manager.site.is_answered_back = False
            lower = replace(quorum, quorum_id=manager.told_id - 1)
            manager.driver.handle_message(JoinAccepted(message.join, lower, message.stands, message.secret))

    def _receive_change(self, message: QuorumChanged) -> None:
        """Note the quorum that the manager computes from a change, if its join still waits."""
        session = self._manager.machine.session
        before = session.known
        self._manager.driver.handle_message(message)
        if session.known is None:
            self._manager.world.counts["changes that were not taken"] += 1
        elif session.known is not before:
            quorum = session.known.quorum
            self._manager.was_handed(JoinAccepted(message.join, quorum, message.stands, message.secret))

    def _ended(self, end: End) -> None:
        if end is self.end:
            self.end = None
            self._wants_another = False
            self._manager.log("has lost its session")
            self._closed()

    def _closed(self) -> None:
        self._manager.driver.end_session()
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
        self._manager.log("moves its session to another connection")
        self._manager.world.counts["sessions moved"] += 1
        self._left_behind.append(self.end)
        self.end = None
        self._manager.driver.end_session(is_moving=True)
        return self._connected(end)


@dataclass(frozen=True, slots=True)
class AskReply:
    """A lighthouse_runtime.ports.Reply."""

    manager: ManagerProcess
    rank: "Rank"
    token: int

    def answer(self, value: tuple[Assignment, Quorum | None]) -> None:
        assignment, quorum = value
        self.manager.site.checkers.answered(self.manager, assignment, is_grant=quorum is None)
        self.manager.reply(self.rank, self.token, "on_quorum", assignment)

    def refuse(self, error: LighthouseError) -> None:
        self.manager.reply(self.rank, self.token, "on_refused", error)


@dataclass(frozen=True, slots=True)
class VoteReply:
    """A lighthouse_runtime.ports.Reply."""

    manager: ManagerProcess
    rank: "Rank"
    token: int

    def answer(self, value: Decision) -> None:
        if value.next is not None:
            self.manager.site.checkers.answered(self.manager, value.next, is_grant=True)
        self.manager.reply(self.rank, self.token, "on_decision", value.commit, value.next)

    def refuse(self, error: LighthouseError) -> None:
        self.manager.reply(self.rank, self.token, "on_refused", error)


@dataclass(frozen=True, slots=True)
class WatchPeer:
    """A lighthouse_runtime.ports.Peer."""

    manager: ManagerProcess
    rank: "Rank"

    def send(self, message: Any) -> None:
        rank, delay_s = self.rank, LOCAL_DELAY_S * self.manager.world.random.uniform(0.3, 3)
        self.manager.world.sends(self.manager.name, rank.name, message)
        match message:
            case Revoked(quorum_id, reason):
                self.manager.log(f"pushes: {quorum_id} is revoked ({reason})")
                rank.after(delay_s, rank.on_revoked, quorum_id)
            case Released():
                rank.after(delay_s, rank.on_released)
            case RankGone(group_rank, reason):
                self.manager.tell_gone(group_rank, rank, reason)
            case _:  # what a person is shown, and how the world is
                pass

    def end(self, error: LighthouseError | None = None) -> None:
        """Do nothing: the rank's host reports the end of a watch (on_watch_end)."""


class Evidence:
    """An EvidenceSource that soon reports that it found nothing."""

    def __init__(self, manager: ManagerProcess) -> None:
        self._manager = manager

    def collect_evidence(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        done = EvidenceDone(request.number)
        self._manager.after(EVIDENCE_TAKES_S, self._manager.tell_lighthouse, done)

    def _nothing(self, *_: Any) -> None:
        pass

    add_watch = drop_watch = take_self_report = close = _nothing
