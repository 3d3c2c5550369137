"""What the driver does beside its machine: timers that have no caller. All else of it runs in the simulator."""

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from lighthouse.job.driver import Answer, JobDriver
from lighthouse.job.events import QuorumEffect, QuorumEvent, Withdrawn
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig, QuorumRecord
from lighthouse.job.run_driver import Ports
from lighthouse.job.store import MemoryStore
from lighthouse_protocol.messages.session import (
    GroupCounts,
    GroupReport,
    Heartbeat,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    QuorumChanged,
    QuorumPhase,
)
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, LimitReached, Unreachable, WrongState
from lighthouse_protocol.rules.quorum_change import NamedQuorum, apply_change
from tests.lighthouse.builders import group
from tests.lighthouse.peers import Caller, Listener
from tests.lighthouse.sessions import native
from tests.virtual_loop import VirtualLoop


class Unwritable(MemoryStore):
    def commit(self, job: str, record: QuorumRecord) -> None:
        raise Unreachable("no space left on device")


def test_a_quorum_that_cannot_be_written_down_by_a_timer_raises_nothing():
    """a is waited for by nobody, and forms without b, which is alive, when its time for that is over."""
    loop = VirtualLoop()
    machine = QuorumMachine(QuorumConfig(min_replicas=1, join_timeout_s=2.0))
    driver = JobDriver("j", machine, Ports(loop, loop.time), store=Unwritable())
    driver.receive_heartbeat_call("b", "b.0")
    driver.request_quorum(group("a"), 60.0, Caller[Answer]())
    loop.go(4.0)
    assert machine.quorum is not None


def test_nor_does_one_that_comes_first_after_a_pause():
    """A quorum forms by the pause itself."""

    def handle_pause() -> None:
        if loop.now > 1001.0:
            raise Unreachable("no space left on device")

    loop = VirtualLoop()
    driver = JobDriver("j", QuorumMachine(QuorumConfig(join_timeout_s=2.0)), Ports(loop, loop.time, handle_pause))
    driver.receive_heartbeat_call("b", "b.0")
    driver.request_quorum(group("a"), 60.0, Caller[Answer]())
    loop.go(4.0)
    assert driver.machine.quorum is None


def test_a_call_whose_time_is_over_is_answered_though_the_next_quorum_cannot_be_written_down():
    class Machine(QuorumMachine):
        def handle(self, event: QuorumEvent, now: float) -> Sequence[QuorumEffect]:
            if isinstance(event, Withdrawn):
                raise Unreachable("no space left on device")
            return super().handle(event, now)

    loop, caller = VirtualLoop(), Caller[Answer]()
    driver = JobDriver("j", Machine(QuorumConfig(min_replicas=2)), Ports(loop, loop.time), store=Unwritable())
    driver.request_quorum(group("a"), 10.0, caller)
    loop.go(11.0)
    assert [type(error) for error in caller.errors] == [DeadlinePassed]


def test_a_quorum_is_logged_before_a_group_receives_it(caplog: pytest.LogCaptureFixture):
    """Otherwise `check-history` blames a lighthouse that was killed between the two."""
    logged: list[str] = []

    class First(Caller[Answer]):
        def answer(self, value: Answer) -> None:
            logged.extend(caplog.messages)

    caplog.set_level(logging.INFO)
    loop = VirtualLoop()
    driver = JobDriver("j", QuorumMachine(QuorumConfig()), Ports(loop, loop.time))
    driver.request_quorum(group("a"), 60.0, First())
    assert driver.machine.quorum is not None
    assert f"quorum {driver.machine.quorum.quorum_id}: a@0" in logged


class TestSessions:
    """What is counted of joins by a session is what is counted of joins by a call."""

    def test_a_wait_and_a_refusal(self):
        loop, refused = VirtualLoop(), list[LighthouseError]()
        machine = QuorumMachine(QuorumConfig(min_replicas=2))
        driver = JobDriver("j", machine, Ports(loop, loop.time, refused=refused.append))
        sessions = [driver.open_session(Hello(native(name)), Listener()) for name in "ab"]
        driver.receive_from_manager(sessions[0], JoinRequest(1, native("a"), 60.0))
        loop.go(3.0)
        driver.receive_from_manager(sessions[1], JoinRequest(1, native("b"), 60.0))
        assert (driver.account.waits.count, driver.account.waits.total, refused) == (2, 3.0, [])
        driver.receive_from_manager(sessions[0], JoinRequest(2, native("a", group_world_size=2), 60.0))
        assert [type(error) for error in refused] == [WrongState]

    def test_a_newer_join_that_is_refused_leaves_no_older_one_without_an_answer(self):
        """A quorum with it would be told to nobody."""
        loop = VirtualLoop()
        config = QuorumConfig(join_timeout_s=5.0, heartbeat_timeout_s=60.0)
        driver = JobDriver("j", QuorumMachine(config), Ports(loop, loop.time))
        a, b = Listener(), Listener()
        session, other = (driver.open_session(Hello(native(name)), peer) for name, peer in (("a", a), ("b", b)))
        driver.receive_from_manager(session, JoinRequest(1, native("a"), 60.0))
        driver.receive_from_manager(session, JoinRequest(2, native("b"), 60.0))
        assert [message.join for message in a.messages if isinstance(message, JoinRejected)] == [2]
        driver.receive_from_manager(other, JoinRequest(1, native("b"), 60.0))
        loop.go(6.0)
        quorum = driver.machine.quorum
        assert quorum is not None
        assert [member.replica_id for member in quorum.participants] == ["b"], "a asks for nothing any more"

    def test_a_hello_that_is_refused(self):
        loop, refused = VirtualLoop(), list[LighthouseError]()
        driver = JobDriver(
            "j", QuorumMachine(QuorumConfig(max_replicas=1)), Ports(loop, loop.time, refused=refused.append)
        )
        report = GroupReport(HeldQuorum(1, HoldState.STANDING, 1), counts=GroupCounts(commits=3))
        driver.open_session(Hello(native("a")), Listener())
        driver.open_session(Hello(native("b"), report), Listener())
        assert [type(error) for error in refused] == [LimitReached]
        assert driver.account.group_s(9.0) == 0.0

    def test_the_account_follows_the_reports_of_hello_and_heartbeats(self):
        loop = VirtualLoop()
        driver = JobDriver("j", QuorumMachine(QuorumConfig()), Ports(loop, loop.time))
        session = driver.open_session(Hello(native("a"), GroupReport(counts=GroupCounts(commits=5))), Listener())
        driver.receive_from_manager(session, Heartbeat(1, GroupReport(counts=GroupCounts(commits=7))))
        driver.end_session(session)
        session = driver.open_session(Hello(native("a"), GroupReport(counts=GroupCounts(commits=8))), Listener())
        driver.receive_from_manager(session, Heartbeat(1, GroupReport(counts=GroupCounts(commits=9))))
        assert driver.account.commits == 4


class Groups:
    """By a session each, at a lighthouse of which no quorum stands. `known`: what each was told last."""

    def __init__(self, names: str) -> None:
        loop = VirtualLoop()
        self.driver = JobDriver("j", QuorumMachine(QuorumConfig(stands=False)), Ports(loop, loop.time))
        self.known: dict[str, NamedQuorum] = {}
        self.peers: dict[str, Listener] = {}
        self._sessions: dict[str, int] = {}
        self._joins = 0
        for name in names:
            self.open(name)

    def open(self, name: str) -> None:
        self.peers[name] = Listener()
        self._sessions[name] = self.driver.open_session(Hello(native(name)), self.peers[name])

    def ask(self, names: str, step: int = 0, **holds: str) -> list[JoinAccepted | QuorumChanged]:
        """What each is answered. `holds`: which digest a group names, in place of that of what it was told last."""
        self._joins += 1
        for name in names:
            known = self.known[name].digest if name in self.known else ""
            join = JoinRequest(self._joins, native(name, step), 60.0, holds.get(name, known))
            self.driver.receive_from_manager(self._sessions[name], join)
        return [self._read(name) for name in names]

    def _read(self, name: str) -> JoinAccepted | QuorumChanged:
        told = self.peers[name].messages[-1]
        if isinstance(told, QuorumChanged):
            made = apply_change(self.known[name].quorum, told.change)
            assert made is not None
            self.known[name] = made
        else:
            assert isinstance(told, JoinAccepted)
            self.known[name] = NamedQuorum.of(told.quorum)
        assert told.join == self._joins
        assert self.known[name].quorum == self.driver.machine.quorum
        return told


class TestAQuorumByWhatHasChanged:
    def test_the_members_of_the_last_one_are_told_the_same_change_and_a_newcomer_all(self):
        groups = Groups("abc")
        assert {type(told) for told in groups.ask("abc")} == {JoinAccepted}
        groups.open("d")
        newcomer, *others = groups.ask("dabc", 1)
        assert isinstance(newcomer, JoinAccepted)
        changes = {id(told.change) for told in others if isinstance(told, QuorumChanged)}
        assert (len(others), len(changes)) == (3, 1), "made once"
        assert {type(told) for told in groups.ask("dabc", 2)} == {QuorumChanged}

    def test_what_holds_another_one_or_does_not_say_is_told_all(self):
        groups = Groups("abc")
        groups.ask("abc")
        first = groups.known["b"].digest
        groups.ask("abc", 1)
        told = groups.ask("abc", 2, b=first, c="")
        assert [type(one) for one in told] == [QuorumChanged, JoinAccepted, JoinAccepted]

    def test_so_are_all_by_a_lighthouse_that_has_not_told_the_last_one(self):
        groups = Groups("ab")
        groups.ask("ab")
        later = Groups("ab")
        later.known = groups.known
        assert {type(told) for told in later.ask("ab", 1)} == {JoinAccepted}

    def test_one_that_comes_by_another_session_is_told_the_change_if_it_holds_the_last_one(self):
        groups = Groups("ab")
        groups.ask("ab")
        groups.driver.end_session(1)
        groups.open("a")
        assert {type(told) for told in groups.ask("ab", 1)} == {QuorumChanged}


class TestClosings:
    """A host that is busy reads the ends of connections that were cut in one moment one after the other."""

    def closing(self, ends_at: Sequence[float], is_busy: Callable[[], bool]) -> tuple[VirtualLoop, QuorumMachine]:
        """The connections of a, b and c, which stand in a quorum, end so long after now."""
        loop = VirtualLoop()
        driver = JobDriver("j", QuorumMachine(QuorumConfig()), Ports(loop, loop.time, is_busy=is_busy))
        sessions = [driver.open_session(Hello(native(name)), Listener()) for name in "abc"]
        for session, name in zip(sessions, "abc", strict=True):
            driver.receive_from_manager(session, JoinRequest(1, native(name), 60.0))
        for session, delay_s in zip(sessions, ends_at, strict=False):
            loop.call_later(delay_s, driver.end_session, session)
        return loop, driver.machine

    @pytest.mark.parametrize("seed", range(20))
    def test_of_a_cut_network_are_held_however_they_come(self, seed: int):
        draw = random.Random(seed)
        ends_at = sorted(draw.uniform(0.0, 0.25) for _ in range(3))
        loop, machine = self.closing(ends_at, lambda: loop.now < start + ends_at[-1])
        start = loop.now
        loop.go(2.0)
        assert machine.standing.phase is QuorumPhase.STANDING

    @pytest.mark.parametrize(("is_busy", "within_s"), [(False, 0.009), (True, 0.35)])
    def test_of_one_alone_are_a_loss(self, is_busy: bool, within_s: float):
        loop, machine = self.closing([0.0], lambda: is_busy)
        loop.go(within_s)
        assert machine.standing.lost == "a"
