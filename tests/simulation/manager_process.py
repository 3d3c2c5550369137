"""A manager: the product's GroupDriver on a virtual clock, its link to the lighthouse, and the calls of its ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.membership import Assignment, Decision, Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import (
    EvidenceDone,
    EvidenceRequest,
    JoinAccepted,
    Leaving,
    RankGone,
    Released,
    Revoked,
    WatchHello,
)
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.timing.timers import LoopLag
from manager.group.driver import GroupDriver
from manager.group.machine import GroupMachine
from tests.simulation.manager_checks import ManagerChecks
from tests.simulation.manager_link import ManagerLink
from tests.simulation.network import LOCAL_DELAY_S, End
from tests.simulation.observed import observe
from tests.simulation.world import MIN_RATE, Died, Process, Timers, Violation

if TYPE_CHECKING:
    from tests.simulation.group_process import Group
    from tests.simulation.rank import Rank

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
        options: dict[str, Any] = {"secret": self.secret, "check_lag": lag.check}
        self.driver = GroupDriver(me, life, timers, self._link, evidence, self._end, **options)
        lag.listen(self.driver.was_late)
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
        """Whatever a call waits for, its caller is told in time. What holds this process up holds up this look, too,
        and may bring it before the call's own timer: so it looks twice."""
        if (rank, token) in self._calls and not is_last:
            self.after(0, partial(self._check_answered, is_last=True), rank, token)
        elif (rank, token) in self._calls:
            raise Violation(f"S5 {self.name} leaves a call of {rank.name} without an answer for longer than it has")

    def on_cancel(self, rank: "Rank", token: int) -> None:
        """The rank's call is over: it was cancelled, or its connection broke."""
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
        """Its host closes its connections, in any order."""
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
        """It had not voted, so those of its mates are not to wait for it. It looks twice, as above."""
        left = [mate.name for mate, token in waiting if (mate, token) in self._voting and mate.is_up]
        if left and not is_last:
            self.after(0, partial(self._check_votes, is_last=True), rank, waiting)
        elif left:
            raise Violation(f"S7 {self.name} lets {left} wait for the vote of {rank.name}, which is lost")

    def tell_gone(self, group_rank: int, to: "Rank", reason: str) -> None:
        self._gone.add(group_rank)
        to.after(LOCAL_DELAY_S, to.on_mate_gone, reason)

    def check_gone(self, rank: "Rank", patience_s: float, *, is_last: bool = False) -> None:
        """Its mates are told within that time, if they live and no other process has come in its place. While the
        manager is paused the time stands still. It looks twice, as above."""
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

    def _end(self, status: int) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.say(f"ends with status {status}")
        if status == 0:
            self.after(0, self.site.has_left, self)
            return
        self.site.kill()
        raise Died

    def _die(self) -> None:
        self.site.network.end_all(self)
        for rank in self.site.ranks:
            rank.after(self.world.random.uniform(*NOTICE_S), rank.on_manager_gone, self)


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
                self.manager.say(f"pushes: {quorum_id} is revoked ({reason})")
                rank.after(delay_s, rank.on_revoked, quorum_id)
            case Released():
                rank.after(delay_s, rank.on_released)
            case RankGone(group_rank, reason):
                self.manager.tell_gone(group_rank, rank, reason)
            case _:  # what a person is shown, and how the world is
                pass

    def end(self, error: LighthouseError | None = None) -> None:
        """Its end is the host's to tell (on_watch_end of the rank)."""


class Evidence:
    """An EvidenceSource that finds nothing, soon."""

    def __init__(self, manager: ManagerProcess) -> None:
        self._manager = manager

    def collect(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        done = EvidenceDone(request.number)
        self._manager.after(EVIDENCE_TAKES_S, self._manager.tell_lighthouse, done)

    def _nothing(self, *_: Any) -> None:
        pass

    opened = ended = answered = close = _nothing
