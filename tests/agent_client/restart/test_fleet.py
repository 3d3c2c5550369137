"""Wrapped functions in real processes without torch: faults of each kind, spares, and the ends of a run."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_runtime.client.clients import LighthouseClient
from tests.agent_client.restart.fleet import Fleet
from tests.processes import PATIENCE_S, Lighthouse, eventually

FOUR = [0, 1, 2, 3]
LONG = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Lighthouse]:
    with Lighthouse() as lighthouse:
        yield lighthouse


def test_a_failure_in_one_restarts_all_in_their_processes(daemon: Lighthouse, tmp_path: Path) -> None:
    with Fleet(daemon.address, tmp_path, 4) as fleet:
        fleet.runs(0, FOUR)
        pids = [fleet.ranks[slot].pid for slot in FOUR]
        fleet.fail(1)
        assert [place.counters for place in fleet.runs(1, FOUR)] == [(0, 1, 1)] * 4
        fleet.finish()
        fleet.ends_with(0, FOUR)
        assert pids == [fleet.ranks[slot].pid for slot in FOUR]
        assert "Rank 2: Restart complete. Previous: 0, Current: 1" in fleet.ranks[2].log()


def test_a_rank_that_hangs_is_named_and_an_incident(tmp_path: Path) -> None:
    options = '{"active_world_size": 3}'
    with Lighthouse("--stall-timeout", "2s") as lighthouse, LighthouseClient(lighthouse.address) as client:
        with Fleet(lighthouse.address, tmp_path, 4, options=options) as fleet:
            fleet.runs(0, [0, 1, 2])

            def shown() -> dict[int, tuple[str, int | None]]:
                [job] = client.status("", ranks=True, timeout_s=5.0).jobs
                assert {rank.replica_id for rank in job.ranks} <= {fleet.run}
                return {rank.group_rank: (rank.state.value, rank.generation) for rank in job.ranks}

            trains = dict.fromkeys(range(3), ("running", 0)) | {3: ("spare", None)}
            eventually(lambda: shown() == trains, "all ranks are shown")
            time.sleep(2)  # the first steps teach nothing
            with fleet.hung(1):
                eventually(lambda: shown() == trains | {1: ("behind", 0)}, "the rank that hangs is behind")
                [incident] = eventually(lambda: client.incidents("", timeout_s=5.0), "that is an incident")
            assert (incident.kind, incident.suspects) == (IncidentKind.STALL, (f"{fleet.run}/1",))
            eventually(lambda: client.incidents("", timeout_s=5.0)[0].over_s is not None, "it is over")
            eventually(lambda: client.incidents("", timeout_s=5.0)[0].step_s is not None, "training goes on")
            assert "in <module>" in client.incident(incident.id, timeout_s=5.0).evidence[0].rank.stacks
            fleet.finish()
            fleet.ends_with(0, FOUR)


def test_a_lighthouse_that_was_paused_finds_no_stall_by_that(tmp_path: Path) -> None:
    stalls = ("--stall-timeout", "2s", "--on-stall", "restart-suspects")
    with Lighthouse(*stalls) as lighthouse, LighthouseClient(lighthouse.address) as client:
        with Fleet(lighthouse.address, tmp_path, 3) as fleet:
            fleet.runs(0, [0, 1, 2])
            time.sleep(2)  # the first steps teach nothing
            for _ in range(3):
                with lighthouse.paused():
                    time.sleep(3)
                time.sleep(0.5)
            assert client.incidents("", timeout_s=PATIENCE_S) == ()
            fleet.finish()
            fleet.ends_with(0, [0, 1, 2])
            assert "nothing has moved" not in lighthouse.log()


def test_a_rank_that_hangs_is_interrupted_with_all_and_runs_again_within_the_budget(tmp_path: Path) -> None:
    stalls = ("--stall-timeout", "2s", "--on-stall", "restart-suspects")
    with Lighthouse(*stalls) as lighthouse, LighthouseClient(lighthouse.address) as client:
        with Fleet(lighthouse.address, tmp_path, 3, options='{"max_restarts": 1}') as fleet:
            fleet.runs(0, [0, 1, 2])
            time.sleep(2)  # the first steps teach nothing
            with fleet.hung(1):
                fleet.runs(1, [0, 1, 2])
            stall = next(i for i in client.incidents("", timeout_s=5.0) if i.kind is IncidentKind.STALL)
            assert stall.action == f"interrupted {fleet.run}, the only group: {fleet.run}/1 behind"
            time.sleep(2)
            with fleet.hung(2):
                fleet.ends_with(130, [0, 1, 2])
            assert "max_restarts: 1 restarts within 600 s are used up" in fleet.ranks[0].log()


@pytest.mark.slow
@LONG
def test_a_killed_process_begins_the_next_hundred(daemon: Lighthouse, tmp_path: Path) -> None:
    with Fleet(daemon.address, tmp_path, 4) as fleet:
        fleet.runs(0, FOUR)
        fleet.kill(1)
        fleet.runs(1, [0, 3, 2])  # without it, and without waiting for it; the highest moves into the hole
        fleet.start(1)
        places = fleet.runs(100, [0, 3, 2, 1])
        assert {place.counters[0] for place in places} == {100}
        assert re.search(r"Rank 3: Restart complete. Previous: (0|unknown), Current: 100", fleet.ranks[1].log())
        fleet.finish()
        fleet.ends_with(0, FOUR)


@pytest.mark.slow
@LONG
def test_who_runs_does_without_a_lighthouse_that_restarts(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Lighthouse("--journal", str(journal)) as lighthouse:
        with Fleet(lighthouse.address, tmp_path, 4) as fleet:
            fleet.runs(0, FOUR)
            lighthouse.kill()
            for slot in FOUR:
                fleet.ranks[slot].wait_for_log("^lighthouse unreachable")
            with Lighthouse("--journal", str(journal), "--bind", lighthouse.address):
                for slot in FOUR:
                    fleet.ranks[slot].wait_for_log(r"^lighthouse reachable again \(term 2\)$")
                fleet.fail(0)
                fleet.runs(1, FOUR)  # numbers go on upwards
                fleet.finish()
                fleet.ends_with(0, FOUR)


@pytest.fixture
def six_and_two(daemon: Lighthouse, tmp_path: Path) -> Iterator[Fleet]:
    options = '{"active_world_size": 6, "min_active": 5, "return_timeout": 3}'
    with Fleet(daemon.address, tmp_path, 8, options=options) as fleet:
        fleet.runs(0, [0, 1, 2, 3, 4, 5])
        for spare in (6, 7):
            fleet.becomes_spare(spare, 0)
        yield fleet


@pytest.mark.slow
@LONG
def test_spares_and_a_ninth_disturb_nobody(six_and_two: Fleet) -> None:
    fleet = six_and_two
    ninth = fleet.start(8, slots=8)
    assert ninth.wait() == 1
    assert "slot: is 8; a world of 8 has slots 0 to 7" in ninth.log()
    fleet.kill(7)
    fleet.start(7)
    fleet.becomes_spare(7, 0)
    fleet.runs(0, [0, 1, 2, 3, 4, 5])

    fleet.kill(1)
    first = fleet.runs(1, [0, 6, 2, 3, 4, 5])
    assert {place.counters[1] for place in first} == {1}
    for _ in range(2):  # a returning member is a spare, also one that flaps, without a restart of the others
        fleet.start(1)
        fleet.becomes_spare(1, 1)
        fleet.kill(1)
    fleet.runs(1, [0, 6, 2, 3, 4, 5])
