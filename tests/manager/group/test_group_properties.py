"""A replica group's machine against drawn configurations, drawn faults, honest ranks and an honest lighthouse."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lighthouse_protocol.messages.session import QuorumPhase
from tests.manager.group_stage import Rank, Stage

ranks = st.integers(0, 2)
calls_s = st.sampled_from([0.5, 3.0, 60.0])


class GroupBetweenRanksAndLighthouse(RuleBasedStateMachine):
    stage: Stage
    drains = False

    @initialize(
        size=st.integers(1, 3),
        lease_s=st.sampled_from([2.0, 5.0]),
        watched=st.sampled_from([True, True, True, False]),
        names_quorum=st.sampled_from([True, True, False]),
        wants_next=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        trains=st.booleans(),
        drains=st.sampled_from([False, False, False, True]),
    )
    def begin(
        self,
        size: int,
        lease_s: float,
        watched: bool,
        names_quorum: bool,
        wants_next: tuple[bool, bool, bool],
        trains: bool,
        drains: bool,
    ) -> None:
        self.drains = drains
        self.stage = Stage(size, lease_s, watched=watched, names_quorum=names_quorum, wants_next=wants_next)
        for _ in range(6 * trains):
            self.stage.go_on()

    def rank(self, number: int) -> Rank:
        return self.stage.ranks[number % len(self.stage.ranks)]

    # -- ranks

    @rule(number=ranks)
    def do(self, number: int) -> None:
        self.stage.do(self.rank(number))

    @rule(number=ranks, time_left_s=calls_s)
    def ask(self, number: int, time_left_s: float) -> None:
        rank = self.rank(number)
        if rank.granted is None and rank.watch not in self.stage.leaving:
            self.stage.watch(rank)
            self.stage.ask(rank, time_left_s)

    @precondition(lambda self: any(rank.granted for rank in self.stage.ranks))
    @rule(number=ranks, vote=st.sampled_from([True, True, False]), time_left_s=calls_s)
    def vote(self, number: int, vote: bool, time_left_s: float) -> None:
        if self.rank(number).granted is not None and self.rank(number).watch not in self.stage.leaving:
            self.stage.cast(self.rank(number), vote, time_left_s)

    @rule(number=ranks, keeps_state=st.booleans())
    def kill(self, number: int, keeps_state: bool) -> None:
        self.stage.kill(self.rank(number), keeps_state=keeps_state)

    @rule(number=ranks)
    def leave(self, number: int) -> None:
        self.stage.leave(self.rank(number))

    @rule(number=ranks)
    def watch_again(self, number: int) -> None:
        if self.rank(number).watch not in self.stage.leaving:
            self.stage.watch_again(self.rank(number))

    # -- the lighthouse

    @precondition(lambda self: not self.stage.is_open)
    @rule()
    def open(self) -> None:
        self.stage.open()

    @rule()
    def close(self) -> None:
        self.stage.close()

    @precondition(lambda self: self.stage.queue)
    @rule(many=st.sampled_from([1, 1, 2, 9]))
    def deliver(self, many: int) -> None:
        for _ in range(many):
            self.stage.deliver()

    @rule()
    def echo(self) -> None:
        self.stage.say(self.stage.lighthouse.echoes())

    @precondition(lambda self: self.stage.lighthouse.join)
    @rule(stands=st.sampled_from([True, True, True, False]), is_behind=st.booleans())
    def hand(self, stands: bool, is_behind: bool) -> None:
        if self.stage.is_open:
            self.stage.say(self.stage.lighthouse.hand(stands=stands, is_behind=is_behind))

    @precondition(lambda self: self.stage.lighthouse.phase is QuorumPhase.STANDING)
    @rule()
    def recall(self) -> None:
        self.stage.say(self.stage.lighthouse.recall())

    @precondition(lambda self: self.stage.lighthouse.phase is QuorumPhase.RECALLED)
    @rule(more=st.integers(0, 2))
    def resume(self, more: int) -> None:
        self.stage.say(self.stage.lighthouse.resume(more))

    @precondition(lambda self: self.stage.lighthouse.phase not in (QuorumPhase.NONE, QuorumPhase.REVOKED))
    @rule()
    def revoke(self) -> None:
        self.stage.say(self.stage.lighthouse.revoke())

    # -- time

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.7, 4.1, 9.0]))
    def wait(self, seconds: float) -> None:
        self.stage.wait(seconds)

    @rule(rounds=st.integers(1, 4), seconds=st.sampled_from([0.0, 0.1, 0.7]))
    def train(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self.stage.train(seconds)

    @precondition(lambda self: self.stage.queue)
    @rule(seconds=st.sampled_from([1.7, 4.1, 9.0]))
    def stop_for(self, seconds: float) -> None:
        self.stage.stop_for(seconds)

    @rule(rounds=st.integers(1, 4))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.stage.go_on()

    @precondition(lambda self: self.drains)
    @rule()
    def drain(self) -> None:
        self.stage.drain("maintenance")

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.settle()


GroupBetweenRanksAndLighthouse.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestGroupBetweenRanksAndLighthouse = GroupBetweenRanksAndLighthouse.TestCase
