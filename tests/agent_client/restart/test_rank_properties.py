"""Ranks' machines against the lighthouse's own, on a virtual clock, under drawn faults: what holds whatever happens."""

import itertools
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.restart.rules import events
from agent_client.restart.rules.config import RankPhase
from agent_client.restart.rules.machine import RankMachine
from lighthouse.runs.rules import events as generation_events
from lighthouse.runs.rules.machine import RunMachine
from lighthouse_protocol.messages.run import (
    FromRunRank,
    RankHello,
    RankId,
    RankWelcome,
    RunCompleted,
    RunTerms,
    ToRunRank,
)
from lighthouse_protocol.refusals import Unreachable
from tests.agent_client.restart.run_inside import event_of, told_by

SIZE = 4
OPERATIONS = st.tuples(
    st.sampled_from(["break", "raise", "return", "pass", "deliver", "deliver", "deliver"]), st.integers(0, SIZE - 1)
)


class World:
    """Each rank's process obeys at once; messages wait in their streams until they are delivered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lighthouse = RunMachine(now=0.0)
        self.streams: dict[int, int] = {}  # slot -> the lighthouse's session
        self.numbers = itertools.count(1)
        self.up: dict[int, deque[FromRunRank]] = {slot: deque() for slot in range(SIZE)}
        self.down: dict[int, deque[ToRunRank]] = {slot: deque() for slot in range(SIZE)}
        self.session: dict[int, int] = {}  # slot -> the rank's
        self.runs: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(SIZE)}
        self.ended: dict[int, object] = {}
        self.ids = [RankId(slot, f"i{slot}") for slot in range(SIZE)]
        terms = RunTerms(SIZE, active=3, join_timeout_s=5.0)
        self.ranks = [RankMachine(RankHello(rank, terms)) for rank in self.ids]
        for slot, rank in enumerate(self.ranks):
            self.perform(slot, list(rank.start(self.now)))
            self.do(slot, events.Waiting())

    def do(self, slot: int, event: events.RankEvent) -> None:
        self.perform(slot, list(self.ranks[slot].handle(event, self.now)))

    def perform(self, slot: int, effects: list[events.RankEffect]) -> None:
        for effect in effects:
            match effect:
                case events.Connect(session):
                    self.lose(slot)
                    self.session[slot], self.streams[slot] = session, next(self.numbers)
                case events.Send(session, message):
                    if self.session.get(slot) == session and slot in self.streams:
                        self.up[slot].append(message)
                case events.Disconnect():
                    self.lose(slot)
                case events.Run(_, rank):
                    self.runs[slot].append((effect.number, rank))
                case events.Ended(outcome):
                    self.ended[slot] = outcome
                case events.Interrupt():
                    self.do(slot, events.Raised("interrupted"))
                    self.do(slot, events.Waiting())
                case events.Kill(reason):
                    raise AssertionError(reason)
                case _:
                    pass
        deadline = self.ranks[slot].deadline(self.now)
        assert deadline is None or deadline > self.now

    def lose(self, slot: int) -> None:
        """Its stream ends, and what is under way on it is lost."""
        session = self.streams.pop(slot, None)
        self.up[slot].clear()
        self.down[slot].clear()
        if session is not None:
            self.hear(generation_events.SessionEnded(session))

    def hear(self, event: generation_events.Event) -> None:
        for effect in self.lighthouse.handle(event, self.now):
            for rank, message in told_by(effect):
                if rank.slot in self.streams:
                    self.down[rank.slot].append(message)

    def deliver(self, slot: int) -> None:
        """One message in each direction."""
        if self.up[slot]:
            message = self.up[slot].popleft()
            self.hear(event_of(self.ids[slot], message, self.streams[slot]))
            if isinstance(message, RankHello):
                self.down[slot].append(RankWelcome())
        if self.down[slot]:
            self.do(slot, events.MessageReceived(self.session[slot], self.down[slot].popleft()))

    def step(self, operation: str, slot: int) -> None:
        is_running = self.ranks[slot].phase is RankPhase.RUNNING
        match operation:
            case "break" if slot in self.streams:
                self.lose(slot)
                self.do(slot, events.StreamClosed(self.session[slot], Unreachable("broken")))
            case "raise" if is_running:
                self.do(slot, events.Raised("boom"))
                self.do(slot, events.Waiting())
            case "return" if is_running:
                self.do(slot, events.Returned())
            case "pass":
                self.pass_time(0.5)
            case _:
                self.deliver(slot)

    def pass_time(self, by_s: float) -> None:
        self.now += by_s
        for effect in self.lighthouse.tick(self.now):
            for rank, message in told_by(effect):
                if rank.slot in self.streams:
                    self.down[rank.slot].append(message)
        for slot, rank in enumerate(self.ranks):
            self.perform(slot, list(rank.tick(self.now)))

    def settle(self) -> None:
        """No more faults: everything is delivered, time passes, and functions return."""
        for _ in range(200):
            for slot in range(SIZE):
                while self.up[slot] or self.down[slot]:
                    self.deliver(slot)
            if len(self.ended) == SIZE:
                return
            for slot in range(SIZE):
                self.step("return", slot)
            self.pass_time(0.5)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=120))
def test_numbers_rise_are_agreed_on_and_all_end(operations: list[tuple[str, int]]) -> None:
    world = World()
    for operation, slot in operations:
        world.step(operation, slot)
    world.settle()
    for runs in world.runs.values():
        numbers = [number for number, _ in runs]
        assert numbers == sorted(set(numbers))  # each once, and never an older one
    places = [(number, rank) for runs in world.runs.values() for number, rank in runs]
    assert len(places) == len(set(places))  # nobody shares a rank
    assert max(number for number, _ in places) <= world.lighthouse.generations.current.number  # nobody made one up
    assert {type(outcome) for outcome in world.ended.values()} == {RunCompleted}
    assert len(world.ended) == SIZE
