"""What a manager's driver keeps on the loop."""

import asyncio
from typing import Any

import pytest

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.session import HeartbeatAck, JoinAccepted, ToManager, Welcome
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
from manager.evidence.collector import EvidenceCollector
from manager.group.driver import GroupDriver
from manager.group.lighthouse_link import LighthouseLink
from tests.manager.builders import ask
from tests.manager.groups import formed, vote
from tests.virtual_loop import VirtualLoop


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Those that are set from now on."""
    loop, made = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def record(*args: Any, **options: Any) -> asyncio.TimerHandle:
        made.append(call_later(*args, **options))
        return made[-1]

    monkeypatch.setattr(loop, "call_later", record)
    return made


def driver() -> GroupDriver:
    """Of two ranks; it never meets a lighthouse."""
    link = LighthouseLink(lambda: AsyncLighthouseClient("localhost"), "localhost")
    return GroupDriver(
        Participant("a", group_world_size=2), "L", link, EvidenceCollector(2, link.send), lambda status: None
    )


async def test_a_report_by_a_stranger_is_no_error_of_the_rank(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        driver().report(0, "a stranger", "the loss is odd", ends_group=False)
    [record] = caplog.records
    assert (record.levelname, "does not watch says that rank 0 has failed: the loss is odd" in record.getMessage()) == (
        "INFO",
        True,
    )


async def test_a_vote_that_nobody_waits_for_any_more_leaves_no_timer(timers: list[asyncio.TimerHandle]):
    one_of_two = driver()
    vote = one_of_two.cast(60.0, wants_next=False, group_rank=0, step=1, vote=True)
    await asyncio.sleep(0)
    assert [timer.cancelled() for timer in timers[-1:]] == [False]
    one_of_two.end_call(vote.call)
    await asyncio.sleep(0)
    assert [timer.cancelled() for timer in timers[-1:]] == [True]
    assert vote.answer.cancelled()


async def test_a_request_that_is_cancelled_leaves_no_timer(timers: list[asyncio.TimerHandle]):
    one_of_two = driver()
    asking = asyncio.create_task(one_of_two.ask(60.0, group_rank=0, step=0))
    await asyncio.sleep(0)
    assert [timer.cancelled() for timer in timers[-1:]] == [False]
    assert one_of_two.machine.ranks.waiting == (0,)
    asking.cancel()
    await asyncio.wait((asking,))
    assert [timer.cancelled() for timer in timers[-1:]] == [True]
    assert one_of_two.machine.ranks.waiting == ()


class TestWaitForAQuorum:
    @pytest.fixture
    def loop(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> VirtualLoop:
        caplog.set_level("INFO", "manager.group.waits")
        loop = VirtualLoop()
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        return loop

    @pytest.fixture
    def group(self, loop: VirtualLoop) -> GroupDriver:
        """Both ranks have asked, and the wait was logged."""
        group = driver()
        group._opened()
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
        group._received(message)
