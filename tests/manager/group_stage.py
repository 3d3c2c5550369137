"""A replica group's manager between honest ranks and an honest lighthouse, on a virtual clock; and what must be true.

Nothing here shares a rule with manager/: leases, grants and decisions are counted once more, from what is said.
"""

from lighthouse_protocol.messages import session
from lighthouse_protocol.messages.membership import Assignment, Decision, Participant
from lighthouse_protocol.messages.session import HoldState, QuorumPhase, VoteAnswer
from lighthouse_protocol.refusals import DeadlinePassed, Drained, InvalidRequest, Superseded, Unrecoverable
from manager.group import events
from manager.group.events import PendingVote, QuorumRequest
from manager.group.machine import GroupMachine
from manager.group.presence import RETURNS_WITHIN_S
from tests.manager.dumb_lighthouse import DumbLighthouse
from tests.manager.dumb_rank import Call, Lease, Rank

BEAT_S = 1.0


class Stage:
    def __init__(
        self, size: int, lease_s: float, *, watched: bool, names_quorum: bool, wants_next: tuple[bool, ...]
    ) -> None:
        self.machine = GroupMachine(Participant("a", address="a:1", store_address="a:2", group_world_size=size), "L")
        self.now = 0.0
        self.ranks = [Rank(number) for number in range(size)]
        self.watched = watched
        self.names_quorum = names_quorum  # in votes: a yes binds
        self.wants_next = wants_next
        self.lighthouse = DumbLighthouse()
        self.lease = Lease(lease_s)
        self.is_open = False
        self.has_left = False
        self.reason = ""  # of the drain
        self.queue: list[session.ToManager] = []
        self.calls: dict[int, Call] = {}
        self.bound: set[int] = set()  # calls of yes votes that are over, and count
        self.told: session.GroupReport | None = None
        self.stopped: dict[int, int] = {}  # quorum_id -> the highest step that may be granted under it
        self.answers: dict[tuple[int, int], Assignment] = {}
        self.yes: dict[tuple[int, int], set[int]] = {}
        self.decisions: dict[tuple[int, int], bool] = {}
        self.is_behind = False
        self.leaving: dict[int, bool] = {}  # the watches of ranks that leave, and whether they are released
        self.needed: dict[int, set[int]] = {}  # by which ranks one that leaves may still be, after its last step
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- to the machine

    def feed(self, event: events.Event) -> None:
        before = self.machine.held
        effects = list(self.machine.handle(event, self.now))
        after = self.machine.held
        if before is not None and after is not None and after.mode is HoldState.REVOKED:
            was_over = before.mode in (HoldState.REVOKED, HoldState.JOINING, HoldState.LEAVING)
            assert was_over or any(isinstance(effect, events.Pushed) for effect in effects), "its ranks are not told"
        self.perform(effects)

    def perform(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            self.carry(effect)
        if not self.is_behind:
            self.check_at_rest()

    def check_at_rest(self) -> None:
        for left in self.machine.tick(self.now):
            assert isinstance(left, events.SessionGivenUp), "a tick at the same moment finds nothing else left to do"
            self.carry(left)
        due = self.machine.deadline()
        assert due is None or due > self.now
        held = self.machine.held
        assert (
            held is None
            or held.mode not in (HoldState.REVOKED, HoldState.JOINING)
            or not self.machine.group.pending(is_gathering=False)
        )
        is_leaving = held is not None and held.mode is HoldState.LEAVING
        is_down = is_leaving or any(rank.watch is None for rank in self.ranks)
        assert not self.watched or bool(self.machine.group_report().down) == is_down
        unreleased = {watch for watch, is_released in self.leaving.items() if not is_released}
        assert is_leaving or all(self.needed[watch] for watch in unreleased), "a rank that leaves is not released"
        waiting = tuple(sorted(c.rank.number for n, c in self.calls.items() if c.rank.call == n))
        assert self.machine.waiting == waiting, "a call waits that nobody will answer"
        if self.is_open and not self.machine._has_left:  # it may have left while it had nobody to tell
            self.check_told(self.machine.group_report())

    def check_told(self, levels: session.GroupReport) -> None:
        """What the lighthouse waits for is told at once."""
        assert self.told is not None
        assert (self.told.drains, self.told.down) == (levels.drains, levels.down)
        if levels.held is not None and levels.held.mode in (HoldState.RECALLED, HoldState.LEAVING, HoldState.REVOKED):
            assert self.told.held == levels.held

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self._due()) is not None and due <= until:
            self.now = due
            self.catch_up()
        self.now = until

    def stop_for(self, seconds: float) -> None:
        """The manager's process stands still, and then reads all that has come before it looks at the clock."""
        self.now += seconds
        self.is_behind = True
        while self.is_open and self.queue:
            self.deliver()
        self.catch_up()

    def catch_up(self) -> None:
        """All that is due now, in the order in which a loop's timers may come."""
        self.is_behind = True
        self.expire()
        self.is_behind = False
        self.perform(list(self.machine.tick(self.now)))

    def _due(self) -> float | None:
        moments = [call.deadline_at for call in self.calls.values()]
        machine = self.machine.deadline()
        return min([*moments, *([] if machine is None else [machine])], default=None)

    def expire(self) -> None:
        for number, call in sorted(self.calls.items()):
            if number in self.calls and call.deadline_at <= self.now:
                self.end_call(number, "its time is over")

    def end_call(self, number: int, reason: str) -> None:
        rank = self.refuse(number)
        if rank.granted is not None and rank.vote and self.names_quorum:
            self.bound.add(number)
        elif rank.granted is not None and rank.vote:
            rank.vote = None
            self.yes[rank.granted.quorum_id, rank.granted.max_step].discard(rank.number)
        self.feed(events.CallEnded(number, DeadlinePassed(reason)))

    # -- ranks

    def ask(self, rank: Rank, time_left_s: float) -> None:
        number = self.number()
        older = rank.call
        rank.call = number
        self.moves_on(rank)
        self.calls[number] = Call(rank, self.now + time_left_s)
        self.feed(
            QuorumRequest(
                call=number,
                group_rank=rank.number,
                step=rank.step,
                deadline_at=self.now + time_left_s,
                tag_quorum_id=rank.tag,
                rank_incarnation=rank.rank_incarnation,
                commit_failures=rank.failures,
            )
        )
        assert older is None or older not in self.calls, "the older call was not answered"

    def cast(self, rank: Rank, vote: bool, time_left_s: float) -> None:
        assert rank.granted is not None
        rank.vote = vote and rank.vote is not False
        key = (rank.granted.quorum_id, rank.granted.max_step)
        if rank.vote:
            self.yes.setdefault(key, set()).add(rank.number)
        number = self.number()
        self.calls[number] = Call(rank, self.now + time_left_s)
        self.moves_on(rank)
        quorum_id = key[0] if self.names_quorum else None
        self.feed(PendingVote(number, rank.number, key[1], rank.vote, quorum_id, self.wants_next[rank.number]))

    def do(self, rank: Rank) -> None:
        """What an Agent does next, or the script after the one that has ended."""
        if rank.watch in self.leaving:
            if not self.leaving[rank.watch]:
                return
            self.kill(rank, keeps_state=True)
        self.watch(rank)
        if rank.granted is not None:
            self.cast(rank, not rank.granted.revoked, 60.0)
            return
        if rank.call is None and not self.has_left:
            self.ask(rank, 60.0)

    def watch(self, rank: Rank) -> None:
        if self.watched and rank.watch is None:
            rank.watch = self.number()
            self.feed(events.WatchOpened(rank.watch, rank.number, rank.rank_incarnation))

    def watch_again(self, rank: Rank) -> None:
        """By a new stream, before the end of the old one is noticed."""
        old = rank.watch
        if old is not None:
            rank.watch = self.number()
            self.feed(events.WatchOpened(rank.watch, rank.number, rank.rank_incarnation))
            self.feed(events.WatchEnded(old))

    def kill(self, rank: Rank, *, keeps_state: bool) -> None:
        """Its watch ends; its calls' sockets may stay open."""
        watch, step, tag = rank.watch, rank.step, rank.tag
        if watch is not None:
            self.leaving.pop(watch, None)
            self.moves_on(rank)
            rank.watch = None
            self.feed(events.WatchEnded(watch))
        for number in [n for n, call in self.calls.items() if call.rank is rank]:
            self.end_call(number, "it has ended")
        restored = (step, tag) if keeps_state else (0, 0)
        rank.__init__(rank.number, rank.life + 1, None, *restored, since=self.now)

    def leave(self, rank: Rank) -> None:
        """Its script has ended; it stays until it is released, and is started again."""
        if rank.watch is None or rank.watch in self.leaving or rank.call is not None or rank.vote is not None:
            return
        if rank.granted is not None and self.decisions.get((rank.granted.quorum_id, rank.granted.max_step - 1)):
            rank.granted = None  # it came with the last decision
        self.leaving[rank.watch] = False
        self.moves_on(rank)
        staying = [r for r in self.ranks if r.watch is not None and r.watch not in self.leaving and r.call is None]
        self.needed[rank.watch] = {r.number for r in staying} if rank.granted is None else set()
        self.feed(events.RankLeaves(rank.watch, rank.step if rank.granted is None else None))

    def moves_on(self, rank: Rank) -> None:
        for mates in self.needed.values():
            mates.discard(rank.number)

    # -- from the machine

    def carry(self, effect: events.Effect) -> None:
        match effect:
            case events.QuorumAnswered(call, assignment, quorum):
                rank = self.calls.pop(call).rank
                assert rank.call == call
                rank.call, rank.granted, rank.vote = None, assignment, None
                self.check_answer(rank, assignment, formed_by=quorum.quorum_id if quorum else None)
            case VoteAnswer(call) | events.CallRefused(call) if call in self.bound:
                self.bound.discard(call)
            case VoteAnswer(call, Decision(is_commit, following)):
                answered = self.calls.pop(call)
                self.check_decision(answered.rank, is_commit)
                answered.rank.decided(is_commit, following)
                if following is not None:
                    self.check_answer(answered.rank, following, formed_by=None)
            case events.CallRefused(call, error):
                rank = self.refuse(call)
                assert rank.granted is None or isinstance(error, Superseded), f"a vote was refused: {error}"
                assert not isinstance(error, Drained) or self.reason
                assert not isinstance(error, InvalidRequest | Unrecoverable), f"an honest rank is sent away: {error}"
            case events.Sent(message):
                self.said(message)
            case events.Pushed(session.Released(), watches):
                due = {w for w, is_released in self.leaving.items() if not is_released and not self.needed[w]}
                assert set(watches) == due
                self.leaving |= dict.fromkeys(watches, True)
            case events.Pushed(session.RankGone(gone), watches):
                self.check_gone(gone, watches)
            case events.RankGivenUp(gone, _, lost_at):
                assert self.now >= lost_at + RETURNS_WITHIN_S
                assert self.ranks[gone].watch is None
            case events.Pushed(message, watches):
                assert set(watches) == {rank.watch for rank in self.ranks if rank.watch is not None} - set(self.leaving)
                for rank in self.ranks:
                    if rank.granted is not None and rank.granted.quorum_id == message.quorum_id and rank.vote is None:
                        rank.vote = False
                self.stop(message.quorum_id, -1)
            case events.SessionGivenUp():
                self.close()
            case events.GroupLeft():
                assert self.reason
                self.has_left = True
            case events.Killed():
                raise AssertionError("nobody killed it")

    def refuse(self, number: int) -> Rank:
        rank = self.calls.pop(number).rank
        if rank.call == number:
            rank.call = None
        return rank

    def said(self, message: session.ToLighthouse) -> None:
        assert self.is_open
        if isinstance(message, session.Hello | session.Heartbeat):
            self.told = message.levels
        match message:
            case session.Heartbeat(number, levels):
                self.lease.sent_at[number] = self.now
                if levels.held is not None and levels.held.mode in (HoldState.RECALLED, HoldState.LEAVING):
                    self.stop(levels.held.quorum_id, levels.held.granted)
            case session.JoinRequest():
                self.check_join(message)
                if self.machine.held is not None:
                    self.stop(self.machine.held.quorum_id, -1)
            case session.Leave():
                self.has_left = True
            case _:
                pass
        self.lighthouse.hear(message)

    def stop(self, quorum_id: int, upto: int) -> None:
        self.stopped[quorum_id] = min(upto, self.stopped.get(quorum_id, upto))

    # -- checks

    def check_join(self, join: session.JoinRequest) -> None:
        """All ranks ask, and it says what they say."""
        me, asking = join.participant, [call for number, call in self.calls.items() if call.rank.call == number]
        assert sorted(call.rank.number for call in asking) == list(range(len(self.ranks)))
        states = {(rank.step, rank.tag) for rank in self.ranks}
        assert me.step == min(step for step, _ in states)
        assert me.ranks_disagree == (len(states) > 1)
        assert me.tag_quorum_id == (None if me.ranks_disagree else self.ranks[0].tag)
        assert me.seen_quorum_id == max((quorum_id for quorum_id, _ in self.answers), default=0)
        assert join.time_left_s == max(0.001, min(call.deadline_at for call in asking) - self.now)

    def check_gone(self, gone: int, watches: tuple[int, ...]) -> None:
        """Only those are told who were its mates, and are still the same processes."""
        assert self.ranks[gone].watch is None
        told = [rank for rank in self.ranks if rank.watch in watches]
        assert len(told) == len(watches)
        assert all(rank.since + RETURNS_WITHIN_S <= self.now for rank in told)  # rounded as the rule is

    def check_answer(self, rank: Rank, assignment: Assignment, formed_by: int | None) -> None:
        """A step that no rank was let into before is granted; the others get the same answer."""
        key = (assignment.quorum_id, assignment.max_step)
        assert assignment.heals or assignment.revoked or rank.step == assignment.max_step, "it holds another state"
        first = self.answers.setdefault(key, assignment)
        assert (first.replica_ids, first.replica_world_size, first.replica_rank) == (
            assignment.replica_ids,
            assignment.replica_world_size,
            assignment.replica_rank,
        )
        if first is not assignment:
            return
        assert assignment.quorum_id >= max((quorum_id for quorum_id, _ in self.answers), default=0), "an id went back"
        if not self.lighthouse.stood(assignment.quorum_id):
            assert formed_by == assignment.quorum_id
            return
        assert not assignment.revoked
        assert self.now < self.lease.until, "granted beyond the lease"
        assert assignment.max_step <= self.stopped.get(assignment.quorum_id, assignment.max_step), "granted beyond"
        if formed_by is None:
            before = (assignment.quorum_id, assignment.max_step - 1)
            assert self.decisions.get(before) is True, "the step before was not committed under it"

    def check_decision(self, rank: Rank, is_commit: bool) -> None:
        assert rank.granted is not None
        key = (rank.granted.quorum_id, rank.granted.max_step)
        if is_commit:
            assert self.yes.get(key) == set(range(len(self.ranks))), "a rank has not voted yes"
        if rank.vote is False:
            assert not is_commit
        else:
            assert self.decisions.setdefault(key, is_commit) is is_commit, "two decisions"

    # -- the lighthouse

    def open(self) -> None:
        if not self.is_open and not self.has_left:
            self.is_open, self.queue = True, [session.Welcome(BEAT_S, self.lease.lease_s)]
            self.lease.sent_at = {}
            self.feed(events.SessionOpened())

    def close(self) -> None:
        if self.is_open:
            self.is_open, self.queue = False, []
            self.lighthouse.lost_connection()
            self.feed(events.SessionClosed())

    def say(self, messages: list[session.ToManager]) -> None:
        """It is read later, in this order."""
        if self.is_open:
            self.queue += messages

    def deliver(self) -> None:
        if not self.is_open or not self.queue:
            return
        message = self.queue.pop(0)
        if isinstance(message, session.HeartbeatAck):
            self.lease.echoed(message.number)
        order = message if isinstance(message, session.QuorumOrder) else getattr(message, "order", None)
        if order is not None and order.phase is QuorumPhase.RESUMED and self.stopped.get(order.quorum_id, 0) >= 0:
            self.stopped[order.quorum_id] = order.upto
        if order is not None and order.phase is QuorumPhase.REVOKED:
            self.stop(order.quorum_id, -1)
        self.feed(events.Received(message))

    def drain(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.feed(events.DrainAsked(reason))

    # -- when faults end

    def settle(self) -> None:
        """Within a bounded time all ranks train again, in one state; one that drains is gone."""
        for _ in range(60):
            self.go_on()
        before = [rank.step for rank in self.ranks]
        for _ in range(10):
            self.go_on()
        if self.reason:
            assert self.has_left
            return
        assert max(rank.step for rank in self.ranks) - min(rank.step for rank in self.ranks) <= 1
        assert all(rank.step > step for rank, step in zip(self.ranks, before, strict=True))

    def go_on(self) -> None:
        """A while in which nothing is hindered."""
        self.open()
        self.say(self.lighthouse.echoes())
        self.say(self.lighthouse.recall() if self.lighthouse.drains else [])
        self.say(self.lighthouse.revoke() if self.lighthouse.has_left else [])
        self.say(self.lighthouse.resume(2) or self.lighthouse.hand(stands=True, is_behind=False))
        self.say(self.lighthouse.dismiss())
        while self.queue:
            self.deliver()
        self.train(0.5)

    def train(self, seconds: float) -> None:
        """The ranks go on, as far as they are let."""
        for rank in self.ranks:
            self.do(rank)
        self.wait(seconds)
