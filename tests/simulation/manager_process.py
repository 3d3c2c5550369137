"""A manager: its machine, driven as in production, its link to the lighthouse, and the calls of its ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import JoinAccepted, JoinRejected, Released, Revoked, Welcome
from lighthouse_protocol.refusals import DeadlinePassed
from manager.group.rules import events
from manager.group.rules.commit import Decided, Voted
from manager.group.rules.machine import GroupMachine
from manager.group.rules.request import QuorumRequest
from tests.simulation.network import LOCAL_DELAY_S, End
from tests.simulation.world import Died, Process, Timer

if TYPE_CHECKING:
    from tests.simulation.group_process import Group
    from tests.simulation.rank import Rank

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
NOTICE_S = (0.001, 0.05)


@dataclass(slots=True)
class _Call:
    rank: "Rank"
    token: int


class ManagerProcess(Process):
    def __init__(self, site: "Group", life: str) -> None:
        super().__init__(site.world, f"{site.name}.manager", site.host)
        self.site = site
        self.life = life
        me = Participant(
            site.replica_id,
            address=site.address,
            store_address=site.store_address,
            group_world_size=site.size,
        )
        self.machine = GroupMachine(me, life)
        self.link: End | None = None
        self._left_behind: list[End] = []  # until the next welcome
        self._is_connecting = self._wants_another = False
        self.handed: Quorum | None = None  # the last one
        self.seen_id = 0
        self.told_id = 0
        self.granted = -1
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._watching: dict[int, Rank] = {}
        self._backoff_s = FIRST_BACKOFF_S
        self._timer = Timer(self, self._tick)
        self._has_ended = False
        self.on_death.append(self._die)
        self._connect()

    @property
    def incarnation(self) -> str:
        return self.machine.incarnation

    # -- the link

    def _connect(self) -> None:
        self.site.connect_to_lighthouse(self, self._connected, self._connect_later)

    def _connect_later(self) -> None:
        delay_s = self._backoff_s * self.world.random.uniform(0.5, 1)
        self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)
        self.after(delay_s, self._connect)

    def _connect_beside(self) -> None:
        if self._wants_another and not self._is_connecting:
            self._is_connecting = True
            self.site.connect_to_lighthouse(self, self._connected_beside, self._not_connected_beside)

    def _not_connected_beside(self) -> None:
        self._is_connecting = False
        self.after(FIRST_BACKOFF_S, self._connect_beside)

    def _connected_beside(self, end: End) -> None:
        self._is_connecting = False
        if self.link is None or not self._wants_another:
            return end.close()
        self.say("moves its session to another connection")
        self.world.counts["sessions moved"] += 1
        self._left_behind.append(self.link)
        self.link = None
        self.feed(events.SessionClosed())
        return self._connected(end)

    def _connected(self, end: End) -> None:
        self._wants_another = False
        self.link = end
        end.on_message = lambda message: self._receive(end, message)
        end.on_end = lambda: self._link_ended(end)
        self.feed(events.SessionOpened())

    def _receive(self, end: End, message: Any) -> None:
        if end is not self.link:
            return
        if isinstance(message, Welcome):
            behind, self._left_behind = self._left_behind, []
            for older in behind:
                older.close()
        if isinstance(message, JoinAccepted):
            self.handed = message.quorum
            self.site.checkers.handed(self, message.quorum)
        if not isinstance(message, JoinRejected):
            self._backoff_s = FIRST_BACKOFF_S
        else:
            self.say(f"is refused: {message.error}")
        self.feed(events.Received(message))

    def _link_ended(self, end: End) -> None:
        if end is not self.link:
            return
        self.link = None
        self._wants_another = False
        self.say("has lost its session")
        self.feed(events.SessionClosed())
        self._connect_later()

    def _give_up_link(self, reason: str) -> None:
        self.say(f"gives its session up: {reason}")
        link, self.link = self.link, None
        self._wants_another = False
        if link is not None:
            link.close()
        self.feed(events.SessionClosed())
        self._connect_later()

    def describe(self) -> str:
        held = self.machine.held
        return f"{held.mode} {held.quorum_id}" if held else "holds nothing"

    # -- ranks

    def on_ask(self, rank: "Rank", token: int, time_left_s: float, fields: dict[str, Any]) -> None:
        call = self._new_call(rank, token, time_left_s)
        self.feed(QuorumRequest(call=call, deadline_at=self.clock() + time_left_s, **fields))

    def on_vote(self, rank: "Rank", token: int, time_left_s: float, wants_next: bool, fields: dict[str, Any]) -> None:
        call = self._new_call(rank, token, time_left_s)
        self.feed(Voted(call=call, wants_next=wants_next, **fields))

    def on_cancel(self, rank: "Rank", token: int) -> None:
        """The rank's call is over: it was cancelled, or its connection broke."""
        for number, call in list(self._calls.items()):
            if call.rank is rank and call.token == token:
                del self._calls[number]
                self.feed(events.CallEnded(number))

    def on_watch(self, rank: "Rank") -> None:
        if not rank.is_up:
            return
        watch = next(self._numbers)
        self._watching[watch] = rank
        rank.watch = watch
        self.feed(events.WatchOpened(watch, rank.group_rank, rank.worker))
        rank.after(LOCAL_DELAY_S, rank.on_watched, self)

    def on_leaving(self, rank: "Rank", step: int | None) -> None:
        for watch, watched in self._watching.items():
            if watched is rank:
                self.feed(events.RankLeaves(watch, step))

    def on_watch_end(self, watch: int) -> None:
        if self._watching.pop(watch, None) is not None:
            self.feed(events.WatchEnded(watch))

    def on_rank_death(self, rank: "Rank") -> None:
        """Its host closes its connections, in any order."""
        notice_s = self.world.random.uniform(*NOTICE_S)
        for watch, watched in list(self._watching.items()):
            if watched is rank:
                self.after(notice_s, self.on_watch_end, watch)
        for number, call in list(self._calls.items()):
            if call.rank is rank:
                self.after(self.world.random.uniform(*NOTICE_S), self._end_call, number, None)

    def _new_call(self, rank: "Rank", token: int, time_left_s: float) -> int:
        number = next(self._numbers)
        self._calls[number] = _Call(rank, token)
        if rank.is_up:
            self.after(time_left_s / self.rate, self._end_call, number, DeadlinePassed("no answer in time"))
        else:
            self.after(LOCAL_DELAY_S, self._end_call, number, None)
        return number

    def _end_call(self, number: int, error: DeadlinePassed | None) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        self.feed(events.CallEnded(number) if error is None else events.CallExpired(number, error))
        if error is not None:
            call.rank.after(LOCAL_DELAY_S, call.rank.on_refused, call.token, error)

    # -- the machine

    def drain(self, reason: str) -> None:
        self.feed(events.DrainAsked(reason))

    def feed(self, event: events.Event) -> None:
        self._perform(self.machine.handle(event, self.clock()))

    def _tick(self) -> None:
        self._perform(self.machine.tick(self.clock()))

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Sent(message):
                    if self.link is not None:
                        self.link.send(message)
                case events.QuorumAnswered(call, assignment, quorum):
                    self.site.checkers.answered(self, assignment, is_grant=quorum is None)
                    self._reply(call, "on_quorum", assignment)
                case Decided(call, commit, _, granted):
                    if granted is not None:
                        self.site.checkers.answered(self, granted, is_grant=True)
                    self._reply(call, "on_decision", commit, granted)
                case events.CallRefused(call, error):
                    self._reply(call, "on_refused", error)
                case events.Pushed(message, watches):
                    self._push(message, watches)
                case events.RankGivenUp(rank, reason):
                    self.say(f"gives rank {rank} up: {reason}")
                case events.SessionSilent():
                    self._wants_another = True
                    self._connect_beside()
                case events.SessionHeard():
                    self._wants_another = False
                case events.SessionGivenUp(reason):
                    self._give_up_link(reason)
                case events.Killed(reason):
                    self.say(f"is told to end: {reason}")
                    self.site.kill()
                    raise Died
                case events.HasLeft(reason):
                    self._left(reason)
        self._timer.set(self.machine.deadline())

    def _reply(self, number: int, method: str, *args: Any) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            delay_s = LOCAL_DELAY_S * self.world.random.uniform(0.3, 3)
            call.rank.after(delay_s, getattr(call.rank, method), call.token, *args)

    def _push(self, message: Any, watches: tuple[int, ...]) -> None:
        if isinstance(message, Revoked):
            self.say(f"pushes: {message.quorum_id} is revoked ({message.reason})")
        for watch in watches:
            rank = self._watching.get(watch)
            delay_s = LOCAL_DELAY_S * self.world.random.uniform(0.3, 3)
            if rank is not None and isinstance(message, Revoked):
                rank.after(delay_s, rank.on_revoked, message.quorum_id)
            elif rank is not None and isinstance(message, Released):
                rank.after(delay_s, rank.on_released)

    # -- its end

    def _left(self, reason: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.say(f"has left: {reason}")
            self.after(0, self.site.has_left, self)

    def _die(self) -> None:
        self.site.network.end_all(self)
        for rank in self.site.ranks:
            rank.after(self.world.random.uniform(*NOTICE_S), rank.on_manager_gone, self)
