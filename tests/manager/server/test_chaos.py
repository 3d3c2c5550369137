"""What a manager does at the orders of `lighthouse chaos`, and that each fault ends, whatever happens."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from lighthouse_protocol.messages.chaos import FaultCancelled, FaultKind, FaultOrder, FaultReport
from lighthouse_protocol.messages.session import DrainRequest, Leave
from lighthouse_protocol.refusals import InvalidRequest, NotPermitted, WrongState
from manager.server.chaos import FaultInjector
from tests.manager.recorders import Heard, Link
from tests.virtual_loop import VirtualLoop

KILL, STOP, CUT, SLOW, NAN, OOM, DISK = FaultKind


class Ranks:
    """A supervisor of rank 0."""

    def __init__(self) -> None:
        self.signalled: list[tuple[int | None, int, bool]] = []

    def send_signal(self, rank: int | None, number: int, *, is_largest: bool = False) -> None:
        if rank not in (None, 0):
            raise WrongState(f"rank {rank} is restarting")
        self.signalled.append((rank, number, is_largest))


class Driver:
    """What a GroupDriver was told; its group works at step 5, and an Agent of rank 0 is connected."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.rank = Heard()
        self.step = 5

    def status(self) -> "Driver":
        return self

    def begin_session(self) -> None:
        self.told.append("opened")

    def end_session(self, *, is_moving: bool) -> None:
        self.told.append("moves" if is_moving else "closed")

    def handle_message(self, message: Any) -> None:
        self.told.append(message)

    def send_to_rank(self, group_rank: int, message: Any) -> bool:
        self.rank.send(message)
        return group_rank == 0


class Stage:
    def __init__(self, *, is_allowed: bool = True, is_supervised: bool = True) -> None:
        self.loop, self.link, self.ranks, self.driver = VirtualLoop(), Link(), Ranks(), Driver()
        ranks = self.ranks if is_supervised else None
        self.faults = FaultInjector("a", self.link, ranks, self.loop, is_allowed=is_allowed)
        self.opened, self.received, self.closed = self.faults.between(self.driver)  # pyright: ignore[reportArgumentType]

    def order(self, kind: FaultKind, rank: int | None = None, seconds: float = 0.0, number: int = 1, **more: Any):
        """The error with which the fault is refused, None if it begins."""
        self.received(FaultOrder(number, kind, rank, seconds, **more))
        report = self.link.sent.pop()
        assert isinstance(report, FaultReport)
        assert (report.number, report.step) == (number, 5)
        return report.error


def drains(*names: str) -> list[Any]:
    return [DrainRequest(name) for name in names]


@pytest.mark.parametrize("kind", list(FaultKind))
def test_nothing_without_allow_chaos(kind: FaultKind) -> None:
    stage = Stage(is_allowed=False)
    error = stage.order(kind, 0)
    assert isinstance(error, NotPermitted)
    assert str(error) == "the manager of replica group a was started without --allow-chaos"
    assert not stage.ranks.signalled
    assert not stage.driver.rank.messages
    stage.received(DrainRequest("x"))
    assert stage.driver.told == drains("x")


@pytest.mark.parametrize("kind", [KILL, STOP, OOM])
def test_signals_need_a_supervisor(kind: FaultKind) -> None:
    assert "start them with lighthouse-manager run" in str(Stage(is_supervised=False).order(kind, 0))


def test_a_target_that_is_not_there() -> None:
    stage = Stage()
    assert str(stage.order(KILL, 1)) == "rank 1 is restarting"
    assert "no Agent of this rank" in str(stage.order(NAN, 1))
    assert stage.order(STOP, 0, 5.0) is None  # a refused fault does not count as going on


@pytest.mark.parametrize(("kind", "is_largest"), [(KILL, False), (OOM, True)])
def test_kills(kind: FaultKind, is_largest: bool) -> None:
    stage = Stage()
    assert stage.order(kind, 0) is None
    stage.loop.go(10.0)
    assert stage.ranks.signalled == [(0, signal.SIGKILL, is_largest)]


def test_a_kill_of_all_ranks() -> None:
    stage = Stage()
    assert stage.order(KILL) is None
    assert stage.ranks.signalled == [(None, signal.SIGKILL, False)]


STOPPED, CONTINUED = (0, signal.SIGSTOP, False), (0, signal.SIGCONT, False)


class TestStop:
    @pytest.fixture
    def stage(self) -> Stage:
        stage = Stage()
        assert stage.order(STOP, 0, 5.0) is None
        assert stage.ranks.signalled == [STOPPED]
        return stage

    @pytest.mark.parametrize(
        "end",
        [
            pytest.param(lambda stage: stage.loop.go(0.2), id="by itself"),
            pytest.param(lambda stage: stage.received(FaultCancelled(1)), id="with the command"),
            pytest.param(lambda stage: stage.closed(False), id="with the session"),
            pytest.param(lambda stage: stage.faults.close(), id="with the manager"),
        ],
    )
    def test_it_ends_once(self, stage: Stage, end: Callable[[Stage], None]) -> None:
        stage.loop.go(4.9)
        stage.received(FaultCancelled(2))
        assert stage.ranks.signalled == [STOPPED]
        for _ in range(2):
            end(stage)
            assert stage.ranks.signalled == [STOPPED, CONTINUED]
        stage.loop.go(10.0)
        assert stage.ranks.signalled == [STOPPED, CONTINUED]

    def test_a_second_one_is_refused_until_then(self, stage: Stage) -> None:
        assert str(stage.order(STOP, 0, 5.0, number=2)) == "a: another fault of kind stop has not ended yet"
        assert stage.order(KILL, 0, number=3) is None
        stage.loop.go(5.1)
        assert stage.order(STOP, 0, 5.0, number=4) is None

    def test_a_rank_that_was_killed_meanwhile(self, stage: Stage) -> None:
        def send_signal(*_: object, **__: object) -> None:
            raise WrongState("it is restarting")

        stage.ranks.send_signal = send_signal
        stage.loop.go(5.1)


class TestCut:
    def test_nothing_passes_in_either_direction(self) -> None:
        stage = Stage()
        assert stage.order(CUT, seconds=5.0) is None
        stage.faults.send(Leave("x"))
        stage.received(DrainRequest("x"))
        assert (stage.link.sent, stage.driver.told, stage.link.done) == ([], [], [])
        stage.loop.go(5.1)
        assert stage.link.done == ["give up: lighthouse chaos: the cut has ended"]
        stage.faults.send(Leave("y"))
        stage.received(DrainRequest("y"))
        assert (stage.link.sent, stage.driver.told) == ([Leave("y")], drains("y"))

    def test_it_ends_with_the_command_although_nothing_passes(self) -> None:
        stage = Stage()
        assert stage.order(CUT, seconds=5.0) is None
        stage.received(FaultCancelled(1))
        assert len(stage.link.done) == 1

    def test_it_outlives_the_sessions_that_it_ends(self) -> None:
        stage = Stage()
        assert stage.order(CUT, seconds=5.0) is None
        stage.closed(False)
        stage.opened()
        stage.faults.send(Leave("x"))
        assert stage.link.sent == []


class TestSlow:
    def test_each_message_is_late_and_none_overtakes_another(self) -> None:
        stage = Stage()
        assert stage.order(SLOW, seconds=5.0, delay_s=0.5) is None
        for name in "xy":
            stage.received(DrainRequest(name))
        stage.loop.go(0.4)
        assert stage.driver.told == []
        stage.received(DrainRequest("z"))
        stage.loop.go(0.2)
        assert stage.driver.told == drains("x", "y")
        stage.loop.go(0.4)
        assert stage.driver.told == drains("x", "y", "z")

    def test_no_message_overtakes_a_late_one_after_the_end(self) -> None:
        stage = Stage()
        assert stage.order(SLOW, seconds=5.0, delay_s=0.5) is None
        stage.faults.send(Leave("x"))
        stage.received(FaultCancelled(1))
        stage.faults.send(Leave("y"))
        stage.loop.go(1.0)
        assert stage.link.sent == [Leave("x"), Leave("y")]
        stage.faults.send(Leave("z"))
        assert stage.link.sent[-1] == Leave("z")

    def test_late_messages_do_not_reach_the_next_session(self) -> None:
        stage = Stage()
        assert stage.order(SLOW, seconds=5.0, delay_s=0.5) is None
        stage.faults.send(Leave("x"))
        stage.closed(False)
        stage.opened()
        stage.loop.go(1.0)
        assert stage.link.sent == []


@pytest.mark.parametrize("kind", [NAN, DISK])
def test_faults_in_the_rank(kind: FaultKind) -> None:
    stage = Stage()
    assert stage.order(kind, 0, 5.0) is None
    assert stage.driver.rank.messages == [FaultOrder(1, kind, 0, 5.0)]
    stage.received(FaultCancelled(1))
    assert stage.driver.rank.messages[1:] == [FaultOrder(1, kind, 0, 0.0)]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (FaultOrder(1, STOP, 0, 10.5), "stop may last up to 10 s"),
        (FaultOrder(1, CUT, None, 61.0), "cut may last up to 60 s"),
        (FaultOrder(1, SLOW, None, 5.0, 2.5), "a delay is at most 2 s"),
        (FaultOrder(1, CUT, 0, 5.0), "cut hits the manager"),
        (FaultOrder(1, NAN, None, 5.0), "nan hits one rank"),
        (FaultOrder(1, OOM, None), "oom hits one rank"),
        (
            FaultOrder(1, "clock", 0, 5.0),
            "kind: 'clock' is unknown to the manager of replica group a, which knows kill, stop",
        ),
    ],
)
def test_a_manager_refuses_the_orders_of_a_newer_lighthouse(order: FaultOrder, words: str) -> None:
    stage = Stage()
    stage.received(order)
    [report] = stage.link.sent
    assert isinstance(report, FaultReport)
    assert report.number == 1
    assert isinstance(report.error, InvalidRequest)
    assert words in str(report.error)
    stage.received(DrainRequest("x"))
    assert stage.driver.told == drains("x")
    assert not stage.ranks.signalled
    assert not stage.driver.rank.messages
