"""A replica group's manager between honest ranks and an honest lighthouse, on a virtual clock; and what must be true.

Nothing here shares a rule with manager/: leases, grants and decisions are counted once more, from what is said.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from manager import commit, gather
from manager.events import (
    CallExpired,
    CallRefused,
    DrainAsked,
    Effect,
    Event,
    HasLeft,
    Killed,
    Pushed,
    QuorumAnswered,
    Received,
    Sent,
    SessionClosed,
    SessionGivenUp,
    SessionOpened,
    VoteAnswered,
    VoteCast,
    WatchEnded,
    WatchOpened,
)
from manager.group import GroupMachine
from protos.membership import Assignment, Participant
from protos.refusals import DeadlinePassed, Drained, Superseded
from protos.session import (
    Beat,
    Echo,
    Goodbye,
    Hello,
    HoldMode,
    JoinRequest,
    Leave,
    Levels,
    Phase,
    ToLighthouse,
    ToManager,
    Welcome,
    WithdrawRequest,
)
from tests.manager.dumb_lighthouse import DumbLighthouse

BEAT_S = 1.0


@dataclass
class Rank:
    """`granted` is the step in flight; a yes that was voted binds: it is repeated until the decision is known."""

    number: int
    life: int = 0
    watch: int | None = None
    step: int = 0
    tag: int = 0
    failures: int = 0
    call: int | None = None
    granted: Assignment | None = None
    vote: bool | None = None

    @property
    def worker(self) -> str:
        return f"w{self.number}.{self.life}"

    @property
    def is_idle(self) -> bool:
        return self.call is None and self.granted is None

    def decided(self, is_commit: bool, following: Assignment | None) -> None:
        assert self.granted is not None
        if is_commit:
            self.step, self.tag, self.failures = self.granted.max_step + 1, self.granted.quorum_id, 0
        else:
            self.failures += 1
        self.granted, self.vote = following, None


@dataclass
class _Call:
    rank: Rank
    deadline_at: float
    life: int


@dataclass
class Lease:
    """Reckoned from what was sent and echoed."""

    lease_s: float
    sent_at: dict[int, float] = field(default_factory=dict)
    until: float = 0.0

    def echoed(self, number: int) -> None:
        if number in self.sent_at:
            self.until = max(self.until, self.sent_at[number] + 0.8 * self.lease_s)


class Stage:
    def __init__(self, size: int, lease_s: float, *, watched: bool, wants_next: tuple[bool, ...]) -> None:
        self.machine = GroupMachine(
            Participant("a", address="a:1", store_address="a:2", group_world_size=size), "L"
        )
        self.now = 0.0
        self.ranks = [Rank(number) for number in range(size)]
        self.watched = watched
        self.wants_next = wants_next
        self.lighthouse = DumbLighthouse()
        self.lease = Lease(lease_s)
        self.is_open = False
        self.has_left = False
        self.reason = ""  # of the drain
        self.queue: list[ToManager] = []
        self.calls: dict[int, _Call] = {}
        self.told: Levels | None = None
        self.stopped: dict[int, int] = {}  # quorum_id -> the highest step that may be granted under it
        self.answers: dict[tuple[int, int], Assignment] = {}
        self.yes: dict[tuple[int, int], set[int]] = {}
        self.decisions: dict[tuple[int, int], bool] = {}
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- to the machine

    def feed(self, event: Event) -> None:
        self.perform(list(self.machine.handle(event, self.now)))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.carry(effect)
        assert self.machine.tick(self.now) == [], "a tick at the same moment finds nothing left to do"
        due = self.machine.deadline()
        assert due is None or due > self.now
        waiting = tuple(sorted(c.rank.number for n, c in self.calls.items() if c.rank.call == n))
        assert self.machine.ranks_waiting == waiting, "a call waits that nobody will answer"
        if self.is_open and not self.has_left:
            assert self.told == self.machine.levels, "a level that changed was not told"

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := min((d for d in (self.machine.deadline(), self._call_due()) if d is not None), default=until)) < until:
            self.now = max(self.now, due)
            self.expire()
            self.perform(list(self.machine.tick(self.now)))
        self.now = until
        self.expire()
        self.perform(list(self.machine.tick(self.now)))

    def _call_due(self) -> float | None:
        return min((call.deadline_at for call in self.calls.values()), default=None)

    def expire(self) -> None:
        for number, call in sorted(self.calls.items()):
            if number in self.calls and call.deadline_at <= self.now:
                self.refuse(number)
                self.feed(CallExpired(number, DeadlinePassed("its time is over")))

    # -- ranks

    def ask(self, rank: Rank, time_left_s: float) -> None:
        number = self.number()
        older = rank.call
        rank.call = number
        self.calls[number] = _Call(rank, self.now + time_left_s, rank.life)
        self.feed(
            gather.Ask(
                call=number,
                group_rank=rank.number,
                step=rank.step,
                deadline_at=self.now + time_left_s,
                tag_quorum_id=rank.tag,
                worker=rank.worker,
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
        self.calls[number] = _Call(rank, self.now + time_left_s, rank.life)
        voted = commit.Voted(number, rank.number, key[1], rank.vote, key[0])
        self.feed(VoteCast(voted, self.wants_next[rank.number]))

    def go_on(self, rank: Rank) -> None:
        """What an Agent does next."""
        self.watch(rank)
        if rank.granted is not None:
            self.cast(rank, not rank.granted.revoked, 60.0)
        elif rank.call is None:
            self.ask(rank, 60.0)

    def watch(self, rank: Rank) -> None:
        if self.watched and rank.watch is None:
            rank.watch = self.number()
            self.feed(WatchOpened(rank.watch, rank.number, rank.worker))

    def kill(self, rank: Rank, *, keeps_state: bool) -> None:
        """Its watch ends; its calls' sockets may stay open."""
        watch, step, tag = rank.watch, rank.step, rank.tag
        if watch is not None:
            rank.watch = None
            self.feed(WatchEnded(watch))
        for number in [n for n, call in self.calls.items() if call.rank is rank]:
            self.refuse(number)
            self.feed(CallExpired(number, DeadlinePassed("it has ended")))
        restored = (step, tag) if keeps_state else (0, 0)
        rank.__init__(rank.number, rank.life + 1, None, *restored)

    # -- from the machine

    def carry(self, effect: Effect) -> None:
        match effect:
            case QuorumAnswered(call, assignment, quorum):
                rank = self.calls.pop(call).rank
                assert rank.call == call
                rank.call, rank.granted, rank.vote = None, assignment, None
                self.check_answer(rank, assignment, formed_by=quorum.quorum_id if quorum else None)
            case VoteAnswered(call, is_commit, following):
                answered = self.calls.pop(call)
                self.check_decision(answered.rank, is_commit)
                answered.rank.decided(is_commit, following)
                if following is not None:
                    self.check_answer(answered.rank, following, formed_by=None)
            case CallRefused(call, error):
                rank = self.refuse(call)
                assert rank.granted is None or isinstance(error, Superseded), f"a vote was refused: {error}"
                assert not isinstance(error, Drained) or self.reason
            case Sent(message):
                self.said(message)
            case Pushed(message, watches):
                assert set(watches) == {rank.watch for rank in self.ranks if rank.watch is not None}
                for rank in self.ranks:
                    if rank.granted is not None and rank.granted.quorum_id == message.quorum_id and rank.vote is None:
                        rank.vote = False
                self.stop(message.quorum_id, -1)
            case SessionGivenUp():
                self.close()
            case HasLeft():
                assert self.reason
                self.has_left = True
            case Killed():
                raise AssertionError("nobody killed it")

    def refuse(self, number: int) -> Rank:
        rank = self.calls.pop(number).rank
        if rank.call == number:
            rank.call = None
        return rank

    def said(self, message: ToLighthouse) -> None:
        assert self.is_open
        if isinstance(message, Hello | Beat):
            self.told = message.levels
        match message:
            case Beat(number, levels):
                self.lease.sent_at[number] = self.now
                if levels.held is not None and levels.held.mode is HoldMode.FROZEN:
                    self.stop(levels.held.quorum_id, levels.held.granted)
            case JoinRequest():
                if self.machine.held is not None:
                    self.stop(self.machine.held.quorum_id, -1)
            case Leave():
                self.has_left = True
            case _:
                pass
        self.lighthouse.hear(message)

    def stop(self, quorum_id: int, upto: int) -> None:
        self.stopped[quorum_id] = min(upto, self.stopped.get(quorum_id, upto))

    # -- checks

    def check_answer(self, rank: Rank, assignment: Assignment, formed_by: int | None) -> None:
        """A step that no rank was let into before is granted; the others get the same answer."""
        key = (assignment.quorum_id, assignment.max_step)
        first = self.answers.setdefault(key, assignment)
        assert (first.replica_ids, first.replica_world_size, first.replica_rank) == (
            assignment.replica_ids,
            assignment.replica_world_size,
            assignment.replica_rank,
        )
        if first is not assignment:
            return
        assert assignment.quorum_id >= max((quorum_id for quorum_id, _ in self.answers), default=0), "an id went back"
        stands = self.lighthouse.stands(assignment.quorum_id)
        assert stands or formed_by is not None
        if not stands:
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
            self.is_open = True
            self.queue = [Welcome(BEAT_S, self.lease.lease_s)]
            self.lease.sent_at = {}
            self.feed(SessionOpened())

    def close(self) -> None:
        self.is_open, self.queue = False, []
        self.lighthouse.lost()
        self.feed(SessionClosed())

    def deliver(self) -> None:
        if self.is_open and self.queue:
            message = self.queue.pop(0)
            if isinstance(message, Echo):
                self.lease.echoed(message.number)
            self.note_order(message)
            self.feed(Received(message))
