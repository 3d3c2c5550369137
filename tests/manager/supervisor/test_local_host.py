"""What the ranks of a host have written last, below a real guard."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from manager.guard.client import GuardClient
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.local_host import LocalHost
from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.plan import LaunchPlan, Torchrun
from tests.processes import PATIENCE_S


def plan(layout: Layout, host: int = 0, torchrun: Torchrun | None = None) -> LaunchPlan:
    command = ("sh", "-c", "echo rank $RANK of attempt $LIGHTHOUSE_ATTEMPT; exec sleep 600")
    return LaunchPlan(command, layout, host, "a", "j", "r", "i", "h:1", "h:2", ("h", 3), 0, torchrun=torchrun)


@pytest.fixture
async def guard() -> AsyncIterator[GuardClient]:
    started = GuardClient()
    task = asyncio.create_task(started.run())
    yield started
    await started.stop()
    await task


def host(guard: GuardClient, plan: LaunchPlan) -> LocalHost:
    return LocalHost(plan, guard, SupervisorConfig(), cast(Any, None), lambda _: None)


async def written(local: LocalHost, rank: int) -> tuple[str, ...]:
    """Once it has written something."""
    async with asyncio.timeout(PATIENCE_S):
        while not (last := await local.last_lines(rank)):
            assert last == ()
    return last


async def test_each_rank_has_its_own(guard: GuardClient) -> None:
    local = host(guard, plan(Layout(hosts=2, nproc=2), host=1))
    local.start((2, 3), 7, "unit")
    assert [await written(local, rank) for rank in (2, 3)] == [("rank 2 of attempt 7",), ("rank 3 of attempt 7",)]
    for rank in (0, 9):
        assert await local.last_lines(rank) is None


async def test_torchrun_writes_for_all_of_its_ranks(guard: GuardClient) -> None:
    local = host(guard, plan(Layout(), torchrun=Torchrun("0", 4)))
    local.start((0,), 0, "unit")
    first, last = await written(local, 0), await written(local, 3)
    assert first == last
    assert first[0].endswith(" of attempt 0")
