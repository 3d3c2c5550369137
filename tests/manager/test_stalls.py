"""The frozen run of the document, told by ranks that mark where they are; and healthy runs, that are no stall."""

import random
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.rules.stall import Kind
from tests.manager.marking_ranks import MarkingRanks

VALIDATION = 25


def validated(job: MarkingRanks, *numbers: int) -> None:
    """These ranks do the whole validation, a tick each 0.1 s."""
    for number in numbers:
        with job.ranks[number].phase("validation", VALIDATION):
            for _ in range(VALIDATION):
                job.ranks[number].tick()
                job.go(0.1)


class TestTheDocumentsFreeze:
    def test_a_loader_that_blocks_in_seven_of_eight(self):
        job = MarkingRanks(8)
        with ExitStack() as blocked:
            for rank in job.ranks[1:]:
                blocked.enter_context(rank.phase("validation", VALIDATION))
            validated(job, 0)
            blocked.enter_context(job.ranks[0].collective(1, 1, "all_reduce"))
            assert job.after(55) == ""
            text = "1-7 behind in validation 0/25, 0 waiting in all_reduce"
            assert job.after(10) == text
            assert job.after(3600) == text

    def test_also_where_the_collective_cannot_be_seen(self):
        job = MarkingRanks(8)
        with ExitStack() as blocked:
            for rank in job.ranks[1:]:
                blocked.enter_context(rank.phase("validation", VALIDATION))
            validated(job, 0)
            assert job.after(660) == "1-7 behind in validation 0/25, 0 in step 2"

    def test_one_rank_copies_its_ema_model_and_ddp_broadcasts_its_buffers(self):
        job = MarkingRanks(8)
        with ExitStack() as stuck:
            stuck.enter_context(job.ranks[0].collective(1, 1, "all_reduce", "[2]"))
            for rank in job.ranks[1:]:
                stuck.enter_context(rank.collective(1, 1, "broadcast", "[64]"))
            assert job.after(55) == ""
            assert job.after(10) == "divergence: rank 0 all_reduce, ranks 1-7 broadcast"

    def test_one_slow_rank_is_named_alone(self):
        job = MarkingRanks(8)
        with ExitStack() as stuck:
            for number in (0, 1, 2, 4, 5, 6, 7):
                stuck.enter_context(job.ranks[number].collective(1, 1, "all_reduce"))
            assert job.after(70) == "3 behind in step 2, 0-2, 4-7 waiting in all_reduce"

    def test_a_network_that_is_gone(self):
        job = MarkingRanks(8)
        with ExitStack() as stuck:
            for rank in job.ranks:
                stuck.enter_context(rank.collective(1, 1, "all_reduce"))
            assert job.after(61) == "network or collective: 0-7 in all_reduce, nobody behind"

    def test_rank_0_validates_alone_for_longer_than_any_limit(self):
        """The document's cure: the others have declared to wait, and rank 0 moves."""
        job = MarkingRanks(8)
        with ExitStack() as waits:
            for rank in job.ranks[1:]:
                waits.enter_context(rank.waiting_for("rank 0 validation"))
                waits.enter_context(rank.collective(1, 1, "broadcast"))
            with job.ranks[0].phase("validation", 195):
                for _ in range(195):
                    assert job.after(50) == ""
                    job.ranks[0].tick()
                assert job.after(251) == "0 behind in validation 195/195, 1-7 waiting in broadcast"

    def test_a_process_that_was_stopped_is_behind(self):
        """No beat comes from it; its last said that it runs."""
        job = MarkingRanks(4)
        with ExitStack() as stuck:
            job.beat()
            for number in (0, 1, 2):
                stuck.enter_context(job.ranks[number].collective(1, 1, "all_reduce"))
            job.ranks.pop()
            assert job.after(70) == "3 behind in step 2, 0-2 waiting in all_reduce; no beat from 3"

    def test_it_is_over_when_they_move(self):
        job = MarkingRanks(2)
        with job.ranks[0].collective(1, 1, "all_reduce"):
            assert job.after(70) != ""
            job.ranks[1].tick()
            assert job.after(1) == ""


def train_healthily(job: MarkingRanks, steps: int, step_s: float, checkpoint_s: float, jitter: random.Random) -> int:
    """Each step all ranks compute and meet; every 50 steps rank 0 writes a checkpoint while the others wait in the next
    collective. The first step takes 20 times as long. Asked for a verdict where the stillness is longest."""
    asked = 0
    for step in range(steps):
        for rank in job.ranks:
            rank.step(step)
        if step % 50 == 49:
            with ExitStack() as waits:
                for rank in job.ranks[1:]:
                    waits.enter_context(rank.collective(1, step, "all_reduce"))
                with job.ranks[0].phase("checkpoint"):
                    assert job.after(checkpoint_s * jitter.uniform(0.5, 2.0)) == ""
        compute_s = step_s * jitter.uniform(0.5, 2.0) * (20 if step == 0 else 1)
        slowest = jitter.randrange(len(job.ranks))
        with ExitStack() as waits:
            for number, rank in enumerate(job.ranks):
                if number != slowest:
                    waits.enter_context(rank.collective(1, step + 1, "all_reduce"))
            assert job.after(compute_s) == ""
            with job.ranks[slowest].collective(1, step + 1, "all_reduce"):
                assert job.after(step_s / 10) == ""
        asked += 2
    return asked


@pytest.mark.parametrize(("step_s", "checkpoint_s"), [(0.2, 20.0), (2.0, 300.0), (14.0, 30.0)])
def test_a_thousand_healthy_steps_are_no_stall(step_s: float, checkpoint_s: float):
    job = MarkingRanks(2, is_started=False)
    assert train_healthily(job, 1000, step_s, checkpoint_s, random.Random(7)) == 2000


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.floats(0.01, 14), st.floats(1, 300), st.randoms(use_true_random=False))
def test_no_healthy_run_is_a_stall(size: int, step_s: float, checkpoint_s: float, jitter: random.Random):
    train_healthily(MarkingRanks(size, is_started=False), 101, step_s, checkpoint_s, jitter)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whoever_blocks_is_named_and_nobody_else(data: st.DataObject):
    """After some healthy steps, drawn ranks block before their next collective."""
    size = data.draw(st.integers(2, 8))
    stuck = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    job = MarkingRanks(size, is_started=False)
    steps = data.draw(st.integers(2, 5))
    train_healthily(job, steps, 1.0, 1.0, random.Random(data.draw(st.integers(0, 99))))
    with ExitStack() as waits:
        for number, rank in enumerate(job.ranks):
            rank.step(steps)
            if number not in stuck:
                waits.enter_context(rank.collective(1, steps + 1, "all_reduce"))
        job.go(61)
        verdict = job.verdict()
    assert verdict is not None
    assert verdict.kind is Kind.BEHIND
    assert {name.group_rank for name in verdict.behind} == stuck
