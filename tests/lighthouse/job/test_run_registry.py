"""Every run of a lighthouse, with senders that only listen: quiet ones are dropped and found again, and limits hold."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from lighthouse.job import registry
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.records import QuorumConfig
from lighthouse.job.registry import JobRegistry, RunRegistry
from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import KEY_WRITES_AT_ONCE, NOTED_WITHIN_S, Ports, RunDriver
from lighthouse.job.store import MemoryStore
from lighthouse_protocol.identity import group_run
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.run import (
    FailureReport,
    FinishReport,
    GenerationEnded,
    GenerationFormed,
    HelloRejected,
    KeyKind,
    RankHeartbeat,
    RankHello,
    RankId,
    RankWelcome,
    ReadyReport,
    RunCompleted,
    RunCounters,
    RunTerms,
    SlotGiven,
    SupervisorHello,
)
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LimitReached,
    UnknownName,
    Unreachable,
    WrongState,
)
from lighthouse_protocol.rules.access import short_name
from tests.lighthouse.peers import Listener, NoJobs
from tests.virtual_loop import VirtualLoop

TERMS = RunTerms(world_size=2)
SECRET = "known to these ranks alone"


class Rank(Listener):
    @property
    def heard(self) -> list[object]:
        kinds = GenerationFormed | GenerationEnded | RunCompleted
        return [message for message in self.messages if isinstance(message, kinds)]


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def incidents() -> IncidentRegistry:
    return IncidentRegistry()


def jobs_of(memory: MemoryStore, incidents: IncidentRegistry | None = None) -> JobRegistry:
    loop = asyncio.get_running_loop()
    return JobRegistry(QuorumConfig(), Ports(loop, time.time), memory, incident_registry=incidents)


@pytest.fixture
async def runs(memory: MemoryStore, incidents: IncidentRegistry) -> AsyncIterator[RunRegistry]:
    jobs = jobs_of(memory, incidents)
    yield jobs.runs
    jobs.close("the end")


def entered(driver: RunDriver, slot: int, incarnation: str = "i") -> tuple[int, Rank]:
    listener = Rank()
    entry = RankHello(RankId(slot, f"{incarnation}{slot}"), TERMS, is_ready=True, secret=SECRET)
    return driver.open_rank(entry, listener), listener


async def test_all_are_told_one_message(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    (_, a), (_, b) = entered(driver, 0), entered(driver, 1)
    assert a.heard == b.heard == [GenerationFormed(RunCounters(0), (0, 1))]
    assert a.heard[0] is b.heard[0], "so that it is serialised once"


async def test_what_is_told_was_written_down_before(
    runs: RunRegistry, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    heard_at_write: list[int] = []
    ranks: list[Rank] = []
    commit = memory.commit_run

    def look(*run: Any) -> None:
        heard_at_write.append(sum(len(rank.heard) for rank in ranks))
        commit(*run)

    monkeypatch.setattr(memory, "commit_run", look)
    ranks += [entered(runs.get_run_driver("j", "r"), slot)[1] for slot in (0, 1)]
    assert heard_at_write == [0]
    assert [len(rank.heard) for rank in ranks] == [1, 1]


async def test_slots_of_an_elastic_run_are_given_to_whichever_comes(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    terms = RunTerms(world_size=4, active=3, min_active=2, is_elastic=True)

    def come(incarnation: str, wish: int = 0) -> tuple[int, Rank, list[object]]:
        rank = Rank()
        session = driver.open_rank(RankHello(RankId(wish, incarnation), terms, is_ready=True, secret=incarnation), rank)
        return session, rank, [message for message in rank.messages if not isinstance(message, RankWelcome)]

    heard = [come(each)[2] for each in ("a", "b")]
    assert heard == [[], [SlotGiven(1)]]
    session, _, heard = come("c", wish=3)
    assert heard == [GenerationFormed(RunCounters(0), (0, 1, 3))], "its wish"
    driver.end_rank(session)
    assert come("d", wish=1)[2][0] == SlotGiven(2), "the first one that is free"
    assert come("c", wish=3)[2] == [], "and it keeps the slot that it had"
    assert come("d", wish=0)[2][0] == SlotGiven(2), "whatever it has heard of it"
    _, fifth, _ = come("e")
    assert isinstance(fifth.messages[-1], HelloRejected), "there are no more slots"


async def test_ranks_that_are_behind_are_those_of_a_group_or_slots_of_the_run(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    for name, slot in (("g", 0), ("h/0", 1)):
        driver.open_supervisor(SupervisorHello(name, name, slots=(slot,)), Listener())
    (first, _), (second, listener) = entered(driver, 0), entered(driver, 1)
    assert [driver.fail_ranks(*those, "why") for those in (("g", {1}), ("nobody", {0}))] == [False, False]
    for number, (name, rank, slot) in enumerate((("g", 0, 0), ("h", 0, 1), ("r", 1, 1))):
        assert driver.fail_ranks(name, {rank}, "why")
        assert listener.heard[-1] == GenerationEnded(number, f"slot {slot} (i{slot}) has failed: why", is_failure=True)
        for session in (first, second):
            driver.receive_from_rank(session, ReadyReport(number))


async def test_ranks_that_are_behind_are_those_of_a_group_that_restarts_by_itself(runs: RunRegistry):
    driver = runs.get_run_driver("j", group_run("r", "g"))
    (_, listener), _ = entered(driver, 0), entered(driver, 1)
    assert not driver.fail_ranks("h", {0}, "why")
    assert driver.fail_ranks("g", {1}, "why")
    assert listener.heard[-1] == GenerationEnded(0, "slot 1 (i1) has failed: why", is_failure=True)


async def test_a_run_that_supervisors_share_is_no_groups_own_whatever_its_name(runs: RunRegistry):
    driver = runs.get_run_driver("j", group_run("r", "g"))
    driver.open_supervisor(SupervisorHello("h", "s", slots=(0, 1)), Listener())
    for slot in (0, 1):
        entered(driver, slot)
    assert not driver.fail_ranks("g", {1}, "why")


async def test_a_quiet_run_is_dropped_and_found_again(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    sessions = [entered(driver, slot)[0] for slot in (0, 1)]
    driver.put_key(0, KeyKind.ITERATION, "a", b"1", slot=0, secret=SECRET)
    driver.request_stop("enough", "operator")
    for session in sessions:
        driver.end_rank(session)
    (saved,) = runs.run_statuses("j")
    assert list(runs) == []
    assert (saved.verdict, [rank.state for rank in saved.ranks]) == ("stopped", ["lost", "lost"])
    again = runs.get_run_driver("j", "r")
    assert again is not driver
    assert again.machine.stop is not None
    assert again.machine.keys.present_keys(0)
    assert runs.find_run_driver("j", "r") is again


@pytest.mark.parametrize("end", ["stopped", "finished"])
async def test_ranks_that_were_lost_before_a_quiet_run_was_dropped_do_not_come_back_with_it(
    runs: RunRegistry, end: str
):
    """Nor do they keep their slots, or the terms, from the processes of the next launch."""
    driver = runs.get_run_driver("j", "r")
    sessions = [entered(driver, slot)[0] for slot in (0, 1)]
    if end == "stopped":
        driver.request_stop("enough", "operator")
    else:
        driver.receive_from_rank(sessions[0], FinishReport(0))
        driver.end_rank(sessions.pop())
    await asyncio.sleep(2 * NOTED_WITHIN_S)  # nothing is due to be written
    for session in sessions:
        driver.end_rank(session)
    runs.forget_quiet()
    again = runs.get_run_driver("j", "r")
    assert again is not driver
    assert not again.has_ranks
    again.request_resume()
    rank = Rank()
    other = RankHello(RankId(0, "another"), replace(TERMS, max_restarts=3), is_ready=True, secret="another")
    again.open_rank(other, rank)
    assert not [message for message in rank.messages if isinstance(message, HelloRejected)]


async def test_a_stopped_run_without_processes_is_shown_until_it_is_resumed_or_comes_back(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    session, _ = entered(driver, 0)
    driver.request_stop("enough", "operator")
    assert runs.stopped_status() == (), "it has a process: live_status() has it"
    driver.end_rank(session)
    assert runs.live_status() == ()
    [shown] = runs.stopped_status()
    assert shown.stop is not None
    assert (shown.run, shown.stop.reason) == ("r", "enough")
    runs.find_run_driver("j", "r")
    assert runs.stopped_status() == ()
    assert [run.stop for run in (*runs.live_status(), *runs.stopped_status())] == [shown.stop], "shown once"
    runs.find_run_driver("j", "r").request_resume()
    assert [run for run in (*runs.live_status(), *runs.stopped_status()) if run.stop is not None] == []


async def test_of_stopped_runs_the_newest_are_shown(runs: RunRegistry):
    for n in range(registry.SAVED_SHOWN + 3):
        runs.get_run_driver("j", f"r{n}").request_stop("enough", "operator")
        runs.forget_quiet()
    assert [run.run for run in runs.stopped_status()] == [f"r{n}" for n in range(3, registry.SAVED_SHOWN + 3)]


async def test_a_restart_is_an_incident(runs: RunRegistry, incidents: IncidentRegistry):
    """From the fault to the first step after it; its durations are those that a scrape shows."""
    driver = runs.get_run_driver("j", "r")
    (a, listener), (b, _) = entered(driver, 0), entered(driver, 1)
    driver.receive_from_rank(b, FailureReport(0, "x"))
    for session in (a, b):
        driver.receive_from_rank(session, ReadyReport(0))
    driver.receive_from_rank(a, RankHeartbeat(3))
    assert isinstance(listener.heard[-1], GenerationFormed)
    driver.receive_from_rank(a, RankHeartbeat(4))
    (summary,) = incidents.newest_summaries("j")
    assert summary.text == "run r, generation 0: slot 1 (i1) has failed: x"
    assert (summary.kind, summary.quorum_id) == (IncidentKind.RESTART, 1)
    assert summary.quorum_s is not None
    assert summary.step_s is not None
    assert [(key, each.buckets()[-1]) for key, each in incidents.times.recover.items()] == [
        (("j", IncidentKind.RESTART), ("+Inf", 1))
    ]


async def test_what_is_worth_no_write_of_its_own_is_written_a_little_later(runs: RunRegistry, memory: MemoryStore):
    driver = runs.get_run_driver("j", "r")
    driver.open_supervisor(SupervisorHello("g", "1"), Listener())
    assert memory.load_run(("j", "r")) is None
    await asyncio.sleep(NOTED_WITHIN_S * 2)
    saved = memory.load_run(("j", "r"))
    assert saved is not None
    assert [each.entry.name for each in saved.record.supervisors] == ["g"]


async def test_where_nothing_can_be_written_runs_are_closed_and_forgotten_all_the_same(
    runs: RunRegistry, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    """The daemon is ending by that, and has more to close. Who looks at the status has nothing to do with it."""

    def full(*_: object) -> None:
        raise WrongState("no space left on device")

    monkeypatch.setattr(memory, "commit_run", full)
    supervisor = Listener()
    runs.get_run_driver("j", "r").open_supervisor(SupervisorHello("g", "1"), supervisor)
    gone = runs.get_run_driver("j", "gone")
    gone.end_supervisor(gone.open_supervisor(SupervisorHello("g", "1"), Listener()))
    assert [run.run for run in runs.live_status()] == ["r"]
    runs.jobs.close("the end")
    assert isinstance(supervisor.error, Unreachable)


def test_a_timer_that_comes_first_after_a_pause_raises_nothing():
    """It has no caller that could be told that nothing can be written."""

    def handle_pause() -> None:
        if loop.now > 1001.0:
            late.append(loop.now)
            raise WrongState("no space left on device")

    loop, late = VirtualLoop(), list[float]()
    driver = RunDriver(("j", "r"), RunMachine(), MemoryStore(), Ports(loop, loop.time, handle_pause), NoJobs())
    entered(driver, 0)
    loop.go(100.0)
    assert late != []


async def test_all_are_told_of_the_completion(runs: RunRegistry):
    driver, supervisor = runs.get_run_driver("j", "r"), Listener()
    driver.open_supervisor(SupervisorHello("g", "1"), supervisor)
    ranks = [entered(driver, slot) for slot in (0, 1)]
    for session, _ in ranks:
        driver.receive_from_rank(session, FinishReport(0))
    for listener in (supervisor, *(listener for _, listener in ranks)):
        assert listener.messages[-1] == RunCompleted(0)


async def test_a_refused_rank_ends_and_is_heard_no_more(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    entered(driver, 0)
    session, thief = entered(driver, 0, "thief")
    assert thief.is_ended
    driver.receive_from_rank(session, RankHeartbeat(1))
    driver.end_rank(session)
    assert driver.status().ranks[0].start == short_name("i0")


async def test_who_says_a_second_hello_is_at_fault(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    session, _ = entered(driver, 0)
    with pytest.raises(InvalidRequest, match=r"^hello: "):
        driver.receive_from_rank(session, RankHello(RankId(0, "i0"), TERMS))


async def test_names_and_limits(runs: RunRegistry, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidRequest, match=r"^run: "):
        runs.get_run_driver("j", "a b")
    with pytest.raises(UnknownName, match="known runs: none"):
        runs.find_run_driver("j", "r")
    monkeypatch.setattr(registry, "MAX_RUNS", 1)
    entered(runs.get_run_driver("j", "r"), 0)
    with pytest.raises(LimitReached):
        runs.get_run_driver("j", "other")


async def test_a_lighthouse_that_ends_loses_nobody(runs: RunRegistry):
    driver = runs.get_run_driver("j", "r")
    ranks = [entered(driver, slot) for slot in (0, 1)]
    runs.jobs.close("it ends")
    for session, listener in ranks:
        assert isinstance(listener.error, Unreachable)
        driver.end_rank(session)
    assert driver.machine.generations.current.is_standing
    with pytest.raises(Unreachable, match="it ends"):
        runs.get_run_driver("j", "r")


async def test_keys_are_written_only_so_often(runs: RunRegistry):
    """Each is a durable write, which everybody waits for."""
    driver = runs.get_run_driver("j", "r")
    entered(driver, 0)
    with pytest.raises(LimitReached, match="keys written for one run: at most 1000 at once and 100 a second are taken"):
        for number in range(2 * KEY_WRITES_AT_ONCE):
            with contextlib.suppress(WrongState):
                driver.put_key(0, KeyKind.ITERATION, f"k{number}", b"", slot=0, secret=SECRET)


async def test_the_name_of_a_supervisor_that_does_not_come_back_is_kept_once(
    runs: RunRegistry, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    """After a restart of the lighthouse. The run is quiet after each refusal, and made again by the next attempt."""
    gone, new = (SupervisorHello("g", each, slots=(0,), secret=f"the secret of {each}") for each in ("gone", "new"))
    runs.get_run_driver("j", "r").open_supervisor(gone, Listener())
    runs.jobs.close("a restart")
    again = jobs_of(memory).runs
    monkeypatch.setattr("lighthouse.job.restarts.NAMES_KEPT_S", 0.2)

    def is_refused() -> bool:
        listener = Listener()
        again.forget_quiet()
        again.get_run_driver("j", "r").open_supervisor(new, listener)
        return isinstance(listener.messages[-1], HelloRejected)

    assert is_refused()
    await asyncio.sleep(0.15)
    is_refused()
    await asyncio.sleep(0.15)
    assert not is_refused()
    again.jobs.close("the end")
