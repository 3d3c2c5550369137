"""What the ranks of a host have written last, below a real guard, and when they start, below one that is a script."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lighthouse_protocol.messages.run import ProcessLost, RankId
from manager.guard.child import TAIL_LINES
from manager.guard.client import Command, Ended, GuardClient
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.local_host import LocalHost
from manager.supervisor.rules.events import CheckFailed, CheckPassed, RankEnded
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


async def test_the_rank_behind_a_failure_of_torchrun_is_named_with_the_last_lines() -> None:
    below, losses = Guard(), list[ProcessLost]()
    link = SimpleNamespace(report_loss=losses.append)
    of = plan(Layout(hosts=2), host=1, torchrun=Torchrun("0", 16))
    local = LocalHost(of, cast(Any, below), SupervisorConfig(), cast(Any, link), lambda _: None)
    local.start((1,), 0, "unit")
    [(_, on_end)] = below.started
    frames = tuple(f"line {number}" for number in range(100))
    on_end(Ended(1, ("  rank      : 9 (local_rank: 1)", "  exitcode  : 3 (pid: 77)", *frames)))
    assert losses == [ProcessLost(RankId(9, "i.unit.77"), "exit code 3", frames[-TAIL_LINES:])]


class Guard:
    """Starts nothing."""

    def __init__(self) -> None:
        self.started: list[tuple[Command, Callable[[Ended], None]]] = []
        self.halted: list[int] = []

    def start(self, command: Command, on_end: Callable[[Ended], None]) -> int:
        self.started.append((command, on_end))
        return len(self.started)

    def halt(self, number: int, grace_s: float) -> None:
        self.halted.append(number)


@pytest.mark.parametrize("status", [0, 3])
async def test_ranks_start_when_their_health_check_has_passed(status: int) -> None:
    below, reports = Guard(), list[RankEnded | CheckPassed | CheckFailed]()
    settings = SupervisorConfig(health_check="check gpus")
    local = LocalHost(plan(Layout(nproc=2)), cast(Any, below), settings, cast(Any, None), reports.append)
    local.start((0, 1), 7, "unit")
    await asyncio.sleep(0)
    [(check, on_end)] = below.started
    assert (check.argv, reports) == (("check", "gpus"), [])
    on_end(Ended(status, ("ecc",)))
    ranks = [command.env["RANK"] for command, _ in below.started[1:]]
    if status == 0:
        assert (ranks, reports) == (["0", "1"], [CheckPassed(0, 7)])
    else:
        assert (ranks, reports) == (
            [],
            [CheckFailed(0, "exit code 3: ecc"), RankEnded(0, 7, -15), RankEnded(1, 7, -15)],
        )


async def test_ranks_that_start_separately_share_a_health_check() -> None:
    """At the same time, checks of the same GPUs would fail each other."""
    below, reports = Guard(), list[RankEnded | CheckPassed | CheckFailed]()
    settings = SupervisorConfig(health_check="check")
    local = LocalHost(plan(Layout(nproc=4)), cast(Any, below), settings, cast(Any, None), reports.append)
    local.start((0,), 0, "u0")
    local.start((1,), 3, "u1")
    await asyncio.sleep(0)
    local.start((2,), 0, "u2")
    await asyncio.sleep(0)
    local.start((3,), 0, "u3")
    assert len(below.started) == 1
    below.started[0][1](Ended(0, ()))
    assert [command.argv[0] for command, _ in below.started] == ["check", "sh", "sh", "check"]
    assert reports == [CheckPassed(0, 0), CheckPassed(1, 3)]
    local.halt((2, 3), 10.0)
    assert below.halted == [4]
    below.started[3][1](Ended(-9, ()))
    await asyncio.sleep(0)
    assert reports[2:] == [RankEnded(2, 0, -15), RankEnded(3, 0, -15)]
    assert local.running == (0, 1)
