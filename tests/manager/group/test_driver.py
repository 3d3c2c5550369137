"""What a manager's driver keeps on the loop."""

from typing import Any

import pytest

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import HeartbeatAck, JoinAccepted, ToLighthouse, ToManager, Welcome
from lighthouse_protocol.refusals import DeadlinePassed
from manager.group.driver import GroupDriver
from tests.manager.builders import ask
from tests.manager.groups import formed, vote
from tests.virtual_loop import VirtualLoop


class NoLink:
    """It never meets a lighthouse."""

    error = ""

    def send(self, message: ToLighthouse) -> None:
        pass

    def give_up(self, reason: str) -> None:
        pass

    connect_beside = give_up

    def stay(self) -> None:
        pass


class NoEvidence:
    def _nothing(self, *_: object) -> None:
        pass

    opened = ended = heard = answered = give = close = _nothing


class Caller:
    """A Reply."""

    def __init__(self) -> None:
        self.outcomes: list[object] = []

    def answer(self, value: object) -> None:
        self.outcomes.append(value)

    refuse = answer


def driver(loop: VirtualLoop) -> GroupDriver:
    """Of two ranks."""
    return GroupDriver(Participant("a", group_world_size=2), "L", loop, NoLink(), NoEvidence(), lambda status: None)


def test_a_report_by_a_stranger_is_no_error_of_the_rank(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        driver(VirtualLoop()).report(0, "a stranger", "the loss is odd", ends_group=False)
    [record] = caplog.records
    assert (record.levelname, "does not watch says that rank 0 has failed: the loss is odd" in record.getMessage()) == (
        "INFO",
        True,
    )


def test_a_vote_that_nobody_waits_for_any_more_leaves_no_timer():
    one_of_two, caller = driver(loop := VirtualLoop()), Caller()
    before = loop.timers
    vote = one_of_two.vote(60.0, caller, group_rank=0, step=1, vote=True)
    assert loop.timers == before + 1
    one_of_two.end_call(vote)
    loop.go(100.0)
    assert (loop.timers, caller.outcomes) == (before, [])


def test_a_request_that_is_withdrawn_leaves_no_timer():
    one_of_two, caller = driver(loop := VirtualLoop()), Caller()
    asked = one_of_two.ask(60.0, caller, group_rank=0, step=0)
    assert one_of_two.machine.ranks.waiting == (0,)
    one_of_two.end_call(asked)
    assert one_of_two.machine.ranks.waiting == ()
    loop.go(100.0)
    assert (loop.timers, caller.outcomes) == (0, [])


def test_a_request_is_refused_when_its_time_is_over():
    one_of_two, caller = driver(loop := VirtualLoop()), Caller()
    one_of_two.ask(60.0, caller, group_rank=0, step=0)
    loop.go(59.0)
    assert caller.outcomes == []
    loop.go(2.0)
    [refusal] = caller.outcomes
    assert isinstance(refusal, DeadlinePassed)
    assert "ranks [1] of 2 have not asked for a quorum within 60 s" in str(refusal)


class TestWaitForAQuorum:
    @pytest.fixture
    def loop(self, caplog: pytest.LogCaptureFixture) -> VirtualLoop:
        caplog.set_level("INFO", "manager.group.waits")
        return VirtualLoop()

    @pytest.fixture
    def group(self, loop: VirtualLoop) -> GroupDriver:
        """Both ranks have asked, and the wait was logged."""
        group = driver(loop)
        group.opened()
        hear(group, Welcome(1.0, 60.0), HeartbeatAck(1, 1.0))
        self.ask(group, 1, 0)
        self.ask(group, 2, 1)
        loop.go(6)
        return group

    def ask(self, group: GroupDriver, call: int, rank: int, step: int = 0, **fields: Any) -> None:
        group._feed(ask(call, rank, step, deadline_at=2000.0, tag_quorum_id=step, **fields))

    def commit(self, group: GroupDriver) -> None:
        """The step that the quorum was formed for."""
        hear(group, JoinAccepted(1, formed(1), True))
        for rank in range(2):
            group._feed(vote(3 + rank, rank, 0))

    def test_one_that_is_formed_ends_it(self, group: GroupDriver, caplog: pytest.LogCaptureFixture):
        hear(group, JoinAccepted(1, formed(1), True))
        assert caplog.messages == ["there is a quorum, after 6 s"]

    def test_a_grant_ends_it(self, group: GroupDriver, loop: VirtualLoop, caplog: pytest.LogCaptureFixture):
        self.commit(group)
        loop.go(60)  # the lease has run out
        caplog.clear()
        self.ask(group, 5, 0, 1)
        loop.go(7)
        hear(group, HeartbeatAck(group.machine.session._beats, 1.0))
        assert [line.partition(":")[0] for line in caplog.messages] == [
            "no quorum for 5 s",
            "there is a quorum, after 7 s",
        ]

    def test_a_step_under_a_revoked_one_does_not(
        self, group: GroupDriver, loop: VirtualLoop, caplog: pytest.LogCaptureFixture
    ):
        """A rank has failed in it and asks again; the other one comes to it only now."""
        self.commit(group)
        self.ask(group, 5, 0, 1)
        self.ask(group, 6, 0, 1, commit_failures=1)
        caplog.clear()
        loop.go(6)
        self.ask(group, 7, 1, 1)
        assert [line.partition(":")[0] for line in caplog.messages] == ["no quorum for 5 s"]


def hear(group: GroupDriver, *messages: ToManager) -> None:
    for message in messages:
        group.received(message)
