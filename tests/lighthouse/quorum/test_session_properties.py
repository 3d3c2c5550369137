"""The lighthouse's machine with sessions against drawn configurations, drawn faults and dumb managers."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.events import HeartbeatReceived, Joined, SessionEnded, Withdrawn
from tests.lighthouse.builders import FAR, group
from tests.lighthouse.dumb_manager import DumbManager
from tests.lighthouse.session_stage import NAMES, Stage

TORCHFT = "t"

# -- drawn

names = st.sampled_from(NAMES)
TIMES = (0.0, 0.1, 0.5, 1.0, 2.5, 4.9, 5.1, 11.0, 61.0)


@st.composite
def configs(draw: st.DrawFn) -> QuorumConfig:
    min_replicas = draw(st.integers(1, 2))
    return QuorumConfig(
        min_replicas=min_replicas,
        join_timeout_s=draw(st.sampled_from([1.0, 10.0, 60.0])),
        heartbeat_timeout_s=draw(st.sampled_from([1.0, 5.0])),
        lease_s=draw(st.sampled_from([1.0, 5.0, 12.0])),
        active=draw(st.sampled_from([None, None, None, 2])),
        last_call_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
        allowed_sizes=draw(st.sampled_from([frozenset(), frozenset(), frozenset({2, 4})])),
        stands=draw(st.sampled_from([True, True, True, True, False])),
    )


class LighthouseWithSessions(RuleBasedStateMachine):
    stage: Stage

    @initialize(config=configs(), train=st.sampled_from(["", "a", "ab", "abc", "abcd"]))
    def begin(self, config: QuorumConfig, train: str) -> None:
        """The first groups of a job; the others may come later."""
        self.stage = Stage(config)
        self.stage.wait(1.5, train)

    def manager(self, name: str) -> DumbManager:
        return self.stage.managers[name]

    @rule(name=names)
    def hello(self, name: str) -> None:
        self.stage.hello(self.manager(name))

    @rule(name=names)
    def beat(self, name: str) -> None:
        if self.manager(name).session is not None:
            self.stage.feed(self.manager(name).beat(self.stage.now))

    @rule(name=names)
    def read(self, name: str) -> None:
        self.manager(name).read(self.stage.now, self.stage.config.lease_s)

    @rule(name=names)
    def read_one(self, name: str) -> None:
        if self.manager(name).inbox:
            self.manager(name).read_one(self.stage.now, self.stage.config.lease_s)

    @rule(name=names)
    def advance(self, name: str) -> None:
        self.manager(name).advance(self.stage.now)

    @rule(name=names)
    def fail(self, name: str) -> None:
        self.manager(name).fail()

    @rule(name=names)
    def ask(self, name: str) -> None:
        self.stage.ask(self.manager(name))

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        self.stage.feed_all(self.manager(name).withdraw())

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.manager(name).drains = True

    @rule(name=names)
    def break_connection(self, name: str) -> None:
        self.stage.feed_all(self.manager(name).lose_connection())

    @rule(name=names)
    def vanish(self, name: str) -> None:
        """It has given the connection up; the lighthouse has not noticed."""
        self.manager(name).lose_connection()

    @rule(name=names, keeps_state=st.booleans())
    def kill(self, name: str, keeps_state: bool) -> None:
        self.stage.feed_all(self.manager(name).lose_connection())
        self.manager(name).restart(keeps_state=keeps_state)

    @rule(name=names)
    def replace(self, name: str) -> None:
        self.stage.replace(name)

    @rule()
    def replace_the_quorum(self) -> None:
        for participant in self.stage.standing[-1].participants if self.stage.standing else ():
            self.stage.replace(participant.replica_id)

    @rule(name=names)
    def kill_ranks(self, name: str) -> None:
        if not self.manager(name).down:
            self.stage.feed_all(self.manager(name).lose_ranks(self.stage.now))

    @rule(name=names)
    def revive_ranks(self, name: str) -> None:
        if self.manager(name).down:
            self.manager(name).revive_ranks()

    @rule(name=names, of=names, life=st.integers(90, 99))
    def steal_the_id(self, name: str, of: str, life: int) -> None:
        """Another process with that id says hello: refused while the first one is there, and that changes nothing."""
        thief = DumbManager(of, life)
        before = {s: m.replica_id for s, m in self.stage.machine.presence._sessions.items()}
        session = self.stage.number()
        is_there = (member := self.stage.machine.roster.get(of)) is not None and member.is_connected
        self.stage.feed_all(thief.hello(session, 0, self.stage.now)[:1])
        if is_there:
            assert {s: m.replica_id for s, m in self.stage.machine.presence._sessions.items()} == before
        else:
            self.stage.feed(SessionEnded(session))

    @rule(does=st.sampled_from(["beat", "ask", "ask", "step"]))
    def torchft(self, does: str) -> None:
        """A member without a session: its quorums do not stand."""
        if does == "beat":
            self.stage.feed(HeartbeatReceived(TORCHFT, "u1"))
        else:
            member = self.stage.machine.roster.get(TORCHFT)
            step = member.participant.step + (does == "step") if member and member.participant else 0
            self.stage.feed(Joined(self.stage.number(), group(TORCHFT, step, "u1"), FAR))

    @rule()
    def torchft_gives_up(self) -> None:
        member = self.stage.machine.roster.get(TORCHFT)
        if member is not None and member.call is not None:
            self.stage.feed(Withdrawn(member.call))

    @rule(seconds=st.sampled_from(TIMES), going_on=st.sets(names))
    def wait(self, seconds: float, going_on: set[str]) -> None:
        self.stage.wait(seconds, sorted(going_on), every=max(0.25, seconds / 40))

    @rule(going_on=st.sets(names, min_size=1))
    def train(self, going_on: set[str]) -> None:
        self.stage.wait(1.0, sorted(going_on))

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def pause_the_lighthouse(self, seconds: float) -> None:
        self.stage.be_late(seconds)

    @rule(keeps_journal=st.sampled_from([True, True, True, False]))
    def restart_the_lighthouse(self, keeps_journal: bool) -> None:
        self.stage.restart_lighthouse(keeps_journal=keeps_journal)

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        if not hasattr(self, "stage"):
            return
        machine = self.stage.machine
        known = {*NAMES, TORCHFT}
        assert len(machine.roster) <= len(known)
        assert set(machine.standing.entries) <= known
        assert machine.presence._draining <= known
        assert set(machine.presence._leaving) <= self.stage.open

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            member = self.stage.machine.roster.get(TORCHFT)
            if member is not None and member.call is not None:
                self.stage.feed(Withdrawn(member.call))
            self.stage.settle()


LighthouseWithSessions.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLighthouseWithSessions = LighthouseWithSessions.TestCase
