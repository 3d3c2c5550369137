"""What a manager's driver keeps on the loop."""

import asyncio
from typing import Any

import pytest

from lighthouse_runtime.clients import AsyncLighthouseClient
from manager.driver import ManagerDriver
from manager.lighthouse_link import LighthouseLink
from protos.membership import Participant


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


def driver() -> ManagerDriver:
    """Of two ranks; it never meets a lighthouse."""
    link = LighthouseLink(lambda: AsyncLighthouseClient("localhost"), "localhost")
    return ManagerDriver(Participant("a", group_world_size=2), "L", link, lambda status: None)


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
