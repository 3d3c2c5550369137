"""Every interleaving of the votes of a small group whose manager dies, over the production machines.

A rank asks, is let into a step, votes, and learns what was decided. Its manager may die at any moment, and with it the
answers on their way; a rank may crash, come back by another process, or leave once it has a decision. What is checked:
ranks that live, or have left in good order, never hold two decisions of one step; a bound rank gets the decision, or
is refused where a rank that may have known it has gone; and only then.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from lighthouse_protocol.messages.membership import Decision, Distrust, DistrustKind, Participant
from lighthouse_protocol.messages.session import VoteAnswer
from lighthouse_protocol.refusals import DeadlinePassed, Unrecoverable
from manager.group import events
from manager.group.counts import StepCounts
from manager.group.events import PendingVote
from manager.group.machine import GroupMachine
from manager.group.presence import RETURNS_WITHIN_S
from manager.group.session import SessionMachine
from tests.manager.builders import ask
from tests.manager.groups import formed

Q, FIRST = 1, 5


@dataclass(frozen=True)
class Rank:
    """`at`: the manager that it has called last. `inbox`: an answer on its way."""

    step: int = FIRST
    tag: int = 0
    is_torn: bool = False
    has_failed: bool = False
    phase: str = "idle"
    life: int = 0
    at: int = -1
    inbox: tuple[str, int | bool, int | None] | None = None
    votes: tuple[tuple[int, bool], ...] = ()  # step -> the decision, as it is known here


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    machine: bytes
    manager: int
    deaths: int
    ends: int
    steps: int = 1  # that are voted on
    tears: int = 0

    @property
    def last(self) -> int:
        return FIRST + self.steps

    def put(self, number: int, rank: Rank) -> "World":
        return replace(self, ranks=(*self.ranks[:number], rank, *self.ranks[number + 1 :]))

    def but(self, number: int, **changes: object) -> "World":
        return self.put(number, replace(self.ranks[number], **changes))


def watch(number: int, rank: Rank) -> int:
    return 100 + 10 * number + rank.life


def call(kind: int, number: int, rank: Rank) -> int:
    """10: a vote, 20: a request. A rank has one of each at most."""
    return 100 * rank.life + kind + number


def fed(world: World, *happened: events.RankEvent) -> World:
    machine: GroupMachine = pickle.loads(world.machine)
    for event in happened:
        world = carried(world, machine.handle(event, 0.0))
    return replace(world, machine=frozen(machine))


def frozen(machine: GroupMachine) -> bytes:
    """Without what only counts."""
    machine.counts, machine.session = StepCounts(machine.group), SessionMachine()
    machine.group.effects, machine.group.grants = [], 0
    return pickle.dumps(machine)


def carried(world: World, effects: Sequence[object]) -> World:
    for effect in effects:
        match effect:
            case events.QuorumAnswered(call, assignment):
                answer = ("granted", assignment.max_step, None)
            case VoteAnswer(call, Decision(commit, following)):
                answer = ("decided", commit, following.max_step if following else None)
            case events.CallRefused(call, error):
                is_vote = call % 100 < 20 and is_waited_for(world, call)
                assert not is_vote or isinstance(error, Unrecoverable), f"a vote is refused: {error}"
                answer = ("refused", 0, None)
            case _:
                continue
        if is_waited_for(world, call):
            world = world.but(call % 10, inbox=answer)
    return world


def is_waited_for(world: World, call: int) -> bool:
    rank = world.ranks[call % 10]
    is_current = rank.at == world.manager and rank.life == call // 100
    return is_current and rank.phase == ("asking" if call % 100 >= 20 else "bound")


def called(world: World, number: int, event: events.RankEvent, phase: str) -> World:
    rank = world.ranks[number]
    is_new = rank.at != world.manager
    world = world.but(number, at=world.manager, phase=phase)
    opened = [events.WatchOpened(watch(number, rank), number, f"w{number}.{rank.life}")] if is_new else []
    return fed(world, *opened, event)


def asks(world: World, number: int) -> World:
    rank = world.ranks[number]
    fields = {"rank_incarnation": f"w{number}.{rank.life}", "commit_failures": int(rank.has_failed)}
    if rank.is_torn:
        fields["distrust"] = Distrust(DistrustKind.NOT_APPLIED, "torn", rank.step, rank.tag)
    tag = None if rank.is_torn else rank.tag
    event = ask(call(20, number, rank), number, rank.step, tag_quorum_id=tag, **fields)
    return called(world, number, event, "asking")


def casts(world: World, number: int, vote: bool, phase: str, wants: bool) -> World:
    rank = world.ranks[number]
    return called(world, number, PendingVote(call(10, number, rank), number, rank.step, vote, Q, wants), phase)


def gives_no(world: World, number: int) -> World:
    """Its time was over: it is in no quorum's step, votes no, and asks again."""
    rank = world.ranks[number]
    expired = events.CallEnded(call(20, number, rank), DeadlinePassed("no quorum"))
    no = PendingVote(call(10, number, rank), number, rank.step, False)
    return fed(world.but(number, phase="idle"), expired, no)


def learned(rank: Rank, commit: bool) -> Rank:
    known = (*rank.votes, (rank.step, commit))
    if commit:
        return replace(rank, phase="idle", step=rank.step + 1, tag=Q, has_failed=False, votes=known, inbox=None)
    known = rank.votes if rank.life else known  # a new process holds nothing that a decision would move
    return replace(rank, phase="idle", has_failed=True, votes=known, inbox=None)


def taken(rank: Rank) -> Rank:
    """It reads the answer."""
    assert rank.inbox is not None
    what, value, following = rank.inbox
    if what == "granted":
        return replace(rank, phase="in", step=int(value), inbox=None)
    if what == "refused":
        return replace(rank, phase="refused" if rank.phase == "bound" else "idle", inbox=None)
    after = learned(rank, bool(value))
    return after if following is None else replace(after, phase="in")


def moves(world: World, wants: bool) -> Iterator[World]:
    """What happens by itself."""
    for number, rank in enumerate(world.ranks):
        if rank.inbox is not None:
            yield world.put(number, taken(rank))
        if rank.at != world.manager and rank.phase in ("asking", "bound"):
            lost = world.but(number, inbox=None)
            yield asks(lost, number) if rank.phase == "asking" else casts(lost, number, True, "bound", wants)
        if rank.phase == "idle":
            yield asks(world, number)
        if rank.phase == "in":
            if rank.step < world.last:
                yield casts(world, number, True, "bound", wants)
            yield casts(world, number, False, "in", wants).put(number, learned(rank, False))
            yield world.put(number, learned(rank, False))
        if rank.phase == "asking" and rank.at == world.manager and rank.inbox is None:
            yield gives_no(world, number)
        if rank.phase == "crashed":
            for step, tag in ((FIRST - 1, 0), (FIRST, 0), *([(rank.step, rank.tag)] if rank.tag else [])):
                yield asks(world.but(number, phase="idle", step=step, tag=tag, has_failed=False, life=1, at=-1), number)
    machine: GroupMachine = pickle.loads(world.machine)
    if machine.deadline() is not None:
        after = carried(world, machine.tick(RETURNS_WITHIN_S + 1))
        yield replace(after, machine=frozen(machine))


def faults(world: World) -> Iterator[World]:
    if world.deaths:
        yield replace(world, machine=new_machine(len(world.ranks)), manager=world.manager + 1, deaths=world.deaths - 1)
    for number, rank in enumerate(world.ranks):
        if world.tears and rank.phase == "idle" and rank.tag == Q and not rank.is_torn:
            yield replace(world, tears=world.tears - 1).but(number, is_torn=True)
    if not world.ends:
        return
    for number, rank in enumerate(world.ranks):
        ended = [events.WatchEnded(watch(number, rank))] if rank.at == world.manager else []
        fewer = replace(world, ends=world.ends - 1)
        if rank.phase not in ("crashed", "left", "refused") and rank.life == 0:
            yield fed(fewer.but(number, phase="crashed", inbox=None, votes=()), *ended)
        if rank.phase == "idle" and rank.votes:
            leaves = [events.RankLeaves(watch(number, rank))] if ended else []
            yield fed(fewer.but(number, phase="left", inbox=None), *leaves, *ended)


def new_machine(size: int) -> bytes:
    return pickle.dumps(GroupMachine(Participant("a", group_world_size=size), "L"))


def begin(size: int, deaths: int, ends: int, steps: int, tears: int) -> World:
    """All ranks have asked, and quorum Q stands: its answers are on their way."""
    world = World((Rank(),) * size, new_machine(size), 0, deaths, ends, steps, tears)
    for number in range(size):
        world = asks(world, number)
    machine: GroupMachine = pickle.loads(world.machine)
    machine.requests.renew_lease(1e9)
    machine._enter_quorum(formed(Q, FIRST), 0.0, stands=True)
    world = carried(world, machine.group.effects)
    return replace(world, machine=frozen(machine))


def check_no_split(world: World) -> None:
    told: dict[int, bool] = {}
    for rank in world.ranks:
        if rank.phase != "crashed":
            for step, commit in rank.votes:
                assert told.setdefault(step, commit) is commit, f"commit and discard of step {step}: {world.ranks}"


def check_end(world: World) -> None:
    """Nothing happens any more. A mate that has gone while no manager was there is waited for as long as the vote's
    time lasts: none that computes can be told from it."""
    gone_unseen = any(rank.phase in ("left", "crashed") and rank.at != world.manager for rank in world.ranks)
    waits = [rank for rank in world.ranks if rank.phase == "bound"]
    assert not waits or gone_unseen, f"waits for ever: {world.ranks}"


def is_over(world: World, rank: Rank) -> bool:
    """It has done both steps, or waits for another quorum."""
    joins = rank.phase == "asking" and rank.at == world.manager and rank.inbox is None
    return rank.step == world.last or joins


def explore(size: int, deaths: int, ends: int, *, steps: int, wants: bool, tears: int = 0) -> int:
    """How many states there are."""
    first = begin(size, deaths, ends, steps, tears)
    seen, left = {first}, [first]
    while left:
        world = left.pop()
        check_no_split(world)
        is_refused = any(rank.phase == "refused" for rank in world.ranks)
        assert not is_refused or any(rank.phase in ("crashed", "left") or rank.life for rank in world.ranks)
        if all(is_over(world, rank) for rank in world.ranks):
            continue
        following = list(moves(world, wants))
        if not following:
            check_end(world)
        for after in (*following, *faults(world)):
            if after not in seen:
                seen.add(after)
                left.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("deaths", "steps", "wants"), [(1, 2, False), (1, 2, True), (2, 1, False)], ids=["one", "one, grants ahead", "two"]
)
def test_every_interleaving_with_dying_managers_ends_without_a_split(deaths: int, steps: int, wants: bool) -> None:
    assert explore(2, deaths, 0, steps=steps, wants=wants) > 500


@pytest.mark.parametrize("wants", [False, True])
def test_nor_does_one_whose_state_is_torn_after_the_commit(wants: bool) -> None:
    assert explore(2, 1, 0, steps=2, wants=wants, tears=1) > 1000


@pytest.mark.slow
def test_so_does_every_one_in_which_a_rank_ends_or_leaves() -> None:
    assert explore(2, 1, 1, steps=1, wants=False) > 10_000
