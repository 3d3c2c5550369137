"""An id that nobody can have given out is refused: it is not adopted, not written down, and ends nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.job.events import GenerationFormed, JoinRefused, QuorumFormed, RankJoined, SessionRefused
from lighthouse.job.lineage import AHEAD_MS
from lighthouse.job.records import QuorumConfig
from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.limits import MAX_COUNT, MAX_LEARNED_GENERATION, MAX_QUORUM_ID
from lighthouse_protocol.messages.run import RankHello, RankId, RunTerms
from lighthouse_protocol.messages.session import HeldQuorum, HoldState
from lighthouse_protocol.refusals import InvalidRequest
from tests.lighthouse.builders import AnswersOnly
from tests.lighthouse.lives import FIRST_WALL_MS, JOB, Life, Manager, beat_for, formed
from tests.lighthouse.run_stage import refusal
from tests.lighthouse.sessions import asks, held, native, opened, pulse, welcomed
from tests.virtual_loop import VirtualLoop


@pytest.mark.parametrize("what", ["seen", "tag", "held"])
@pytest.mark.parametrize("quorum_id", [MAX_QUORUM_ID, FIRST_WALL_MS + 10**10])
def test_one_message_disables_no_job(loop: VirtualLoop, tmp_path: Path, what: str, quorum_id: int) -> None:
    """attack.md C1: not now, and not after a restart on the same journal."""
    path = tmp_path / "journal.sqlite"
    life = Life(loop, path)
    a, b = formed(life, "ab")
    evil = Manager("evil", step=1)
    evil.seen, evil.tag = (quorum_id if what == "seen" else 0), (quorum_id if what == "tag" else 0)
    evil.held = HeldQuorum(quorum_id, HoldState.STANDING, 0) if what == "held" else None
    evil.connect(life)
    if evil.ended is None:
        evil.join()
    assert isinstance(evil.ended or evil.refusal, InvalidRequest)
    assert f"is {quorum_id}; this lighthouse's ids are at " in str(evil.ended or evil.refusal)
    b.close()
    a.join()
    beat_for(loop, [a], 1)
    last = a.quorum_id
    assert last < FIRST_WALL_MS + 10**7
    assert life.memory.last_id(JOB) == last
    life.die()
    life = Life(loop, path)
    fresh = formed(life, "xy")
    assert last < fresh[0].quorum_id < FIRST_WALL_MS + 10**7
    life.die()


def test_a_beat_that_holds_such_an_id_ends_its_session() -> None:
    machine = AnswersOnly(QuorumConfig())
    machine.handle(opened(1, "a"), 0)
    [effect] = machine.handle(pulse(1, held=held(MAX_QUORUM_ID)), 0)
    assert isinstance(effect, SessionRefused)
    assert str(effect.error).startswith(f"quorum_id: is {MAX_QUORUM_ID}; ")
    assert machine.presence.seen_id == 0


def test_up_to_a_day_ahead_of_the_clock_is_believed() -> None:
    """Another host's clock, of an earlier life, may have been ahead."""
    for ahead_ms, is_believed in ((AHEAD_MS + 2000, True), (AHEAD_MS + 2001, False)):
        machine = AnswersOnly(QuorumConfig(first_quorum_id=5000))
        machine.handle(opened(1, "a"), 0)
        [effect] = machine.handle(asks(1, 1, "a", seen_quorum_id=5000 + ahead_ms), 2.0)
        assert isinstance(effect, QuorumFormed if is_believed else JoinRefused)


def test_the_clock_runs_before_the_first_group_comes() -> None:
    """For days only ranks of a run may have used the job, and the group has a checkpoint of another lighthouse."""
    machine = AnswersOnly(QuorumConfig(first_quorum_id=5000))
    machine.tick(0)
    days_s = 3 * 86400.0
    assert machine.handle(opened(1, native("a", seen_quorum_id=5000 + int(days_s * 1000))), days_s) == [welcomed(1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, MAX_QUORUM_ID), max_size=6), st.integers(1, 2_000_000_000_000))
def test_whatever_members_say_the_next_id_is_valid(seen_ids: list[int], first_id: int) -> None:
    machine = AnswersOnly(QuorumConfig(first_quorum_id=first_id))
    ids: list[int] = []
    for call, seen_id in enumerate([*seen_ids, 0], start=1):
        for effect in machine.handle(asks(call, None, "a", seen_quorum_id=seen_id), call):
            if isinstance(effect, QuorumFormed):
                ids.append(effect.quorum.quorum_id)
    assert ids
    assert ids == sorted(ids)
    assert ids[-1] <= first_id + 1000 * len(seen_ids) + AHEAD_MS + len(ids) < MAX_QUORUM_ID


# -- runs


@pytest.mark.parametrize("field", ["seen", "generation"])
def test_a_generation_that_a_run_cannot_have_come_to_is_refused(field: str) -> None:
    machine = RunMachine()
    terms = RunTerms(world_size=1)
    evil = RankHello(RankId(0, "evil"), terms, is_ready=True)
    evil = replace(evil, **{field: MAX_LEARNED_GENERATION + 1})
    error = refusal(machine.handle(RankJoined(evil, 1), 0))
    assert str(error).startswith(f"{field}: is {MAX_LEARNED_GENERATION + 1}; this run is at generation -1")
    effects = machine.handle(RankJoined(RankHello(RankId(0, "i1"), terms, is_ready=True), 2), 1)
    [formed_] = [effect for effect in effects if isinstance(effect, GenerationFormed)]
    assert formed_.generation.number == 0


def test_after_the_highest_that_is_learned_a_run_goes_on_for_long() -> None:
    machine = RunMachine()
    terms = RunTerms(world_size=1, stride=65536)
    number = MAX_LEARNED_GENERATION
    for life in range(5):
        rank = RankHello(RankId(0, f"i{life}"), terms, attempt=life, is_ready=True, seen=number)
        effects = machine.handle(RankJoined(rank, life), float(life))
        [formed_] = [effect for effect in effects if isinstance(effect, GenerationFormed)]
        assert number < formed_.generation.number <= number + 65536 < MAX_COUNT
        number = formed_.generation.number
