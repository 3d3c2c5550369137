"""Drawn lives of a supervisor: whatever happens, ranks run once, are stopped before they start again, and it ends."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from manager.supervisor.rules import events
from manager.supervisor.rules.machine import Layout, SupervisorMachine
from manager.supervisor.rules.restart_policy import GROUP_SCOPE, RANK_SCOPE, RestartPolicy

POLICIES = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 4),
    max_startup_failures=st.integers(0, 3),
    exclude_host_after=st.integers(0, 3),
    delay_s=st.floats(0.1, 5),
    scope=st.sampled_from((GROUP_SCOPE, RANK_SCOPE)),
    restart_after_kill=st.booleans(),
)
STATUSES = st.sampled_from((0, 1, 1, 130, -2, -9, -11, -15))


class World:
    """The hosts as the machine is to know them: what runs there, under which attempt."""

    def __init__(self, layout: Layout, policy: RestartPolicy) -> None:
        self.layout = layout
        self.machine = SupervisorMachine(layout, policy, lambda: 0.5, grace_s=5.0, host_timeout_s=60.0)
        self.now = 0.0
        self.attempts: dict[int, int] = {}
        self.halted: set[int] = set()
        self.ready: set[int] = set()
        self.over: events.SupervisionEnded | None = None
        self.asked_stop = self.ending = False

    def feed(self, event: events.Event) -> None:
        self.perform(self.machine.handle(event, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.now:
            self.perform(self.machine.tick(self.now))
            following = self.machine.deadline()
            assert following is None or following > self.now

    def perform(self, effects: Sequence[events.Effect]) -> None:
        assert self.over is None or not effects
        for effect in effects:
            match effect:
                case events.Start(host, ranks, attempt):
                    assert not self.asked_stop
                    assert not self.ending
                    assert host in self.ready
                    for rank in ranks:
                        assert self.layout.host_of(rank) == host
                        assert rank not in self.attempts
                        self.attempts[rank] = attempt
                case events.Halt(host, ranks, grace_s):
                    assert 0.0 <= grace_s <= 5.0
                    assert all(self.layout.host_of(rank) == host for rank in ranks)
                    self.halted |= set(ranks) & self.attempts.keys()
                case events.RunStopAsked():
                    self.asked_stop = True
                case events.SupervisionEnded():
                    self.over = effect
                case _:
                    pass
        assert set(self.machine.running) == self.attempts.keys()
        assert self.over is None or not self.attempts

    def end(self, rank: int, status: int) -> None:
        if rank in self.attempts:
            self.halted.discard(rank)
            self.feed(events.RankEnded(rank, self.attempts.pop(rank), status))

    def come(self, host: int) -> None:
        self.ready.add(host)
        self.feed(events.HostReady(host))

    def go(self, host: int) -> None:
        if host in self.ready:
            self.ready.discard(host)
            for rank in self.layout.ranks_of(host):
                self.attempts.pop(rank, None)
                self.halted.discard(rank)
            self.feed(events.HostLost(host, "gone"))


@given(hosts=st.integers(1, 3), nproc=st.integers(1, 3), policy=POLICIES, data=st.data())
def test_any_life(hosts: int, nproc: int, policy: RestartPolicy, data: st.DataObject) -> None:
    world = World(Layout(hosts, nproc), policy)
    for host in range(hosts):
        world.come(host)
    for _ in range(data.draw(st.integers(0, 25))):
        host = data.draw(st.integers(0, hosts - 1))
        match data.draw(st.integers(0, 19)):
            case 0:
                world.feed(events.KillAsked("x"))
            case 1:
                world.go(host)
            case 2 | 3:
                world.come(host)
            case 4 | 5 | 6 | 7 | 8 | 9:
                world.end(data.draw(st.integers(0, hosts * nproc - 1)), data.draw(STATUSES))
            case 10 | 11 | 12 | 13:
                for rank in sorted(world.halted):
                    world.end(rank, -15)
            case 14 if data.draw(st.integers(0, 4)) == 0:
                world.feed(events.CheckFailed(host, "no GPU"))
            case _:
                world.wait(data.draw(st.floats(0.01, 30)))
    ends(world, data)


def ends(world: World, data: st.DataObject) -> None:
    """Asked to, it ends when no rank runs, whatever it was at; and what is halted ends."""
    world.feed(data.draw(st.sampled_from((events.RunStopped("x"), events.EndAsked(143, "SIGTERM")))))
    world.ending = True
    assert set(world.attempts) == world.halted or world.over is not None
    for rank in sorted(world.attempts):
        world.end(rank, -9)
    assert world.over is not None
    assert world.machine.deadline() is None


@given(nproc=st.integers(1, 4), policy=POLICIES, data=st.data())
def test_left_alone_after_faults_it_ends_well_or_with_a_reason(
    nproc: int, policy: RestartPolicy, data: st.DataObject
) -> None:
    world = World(Layout(1, nproc), policy)
    world.come(0)
    for _ in range(data.draw(st.integers(0, 10))):
        world.end(data.draw(st.integers(0, nproc - 1)), data.draw(STATUSES))
    for _ in range(4 * nproc + 20):
        for rank in sorted(world.attempts):
            world.end(rank, -15 if rank in world.halted else 0)
        world.wait(60.0)
    assert world.over is not None
    assert world.over.status in (0, 1, 130)
    assert (world.over.status == 130) == world.asked_stop
