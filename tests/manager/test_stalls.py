"""The frozen run of the document, told by ranks that mark where they are; and healthy runs, that are no stall."""

import random
from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client.progress.progress import Progress
from agent_client.progress.rules import Number
from lighthouse_protocol.rules.stall import GroupProgress, Kind, Process, StallVerdict


class MarkingRanks:
    """Of one group, on one virtual clock, and the manager that hears of them."""

    def __init__(self, size: int) -> None:
        self.now = 1000.0
        self.ranks = [Progress(lambda: self.now) for _ in range(size)]
        self.manager = GroupProgress()

    def started(self) -> "MarkingRanks":
        """They are in step 2."""
        for number in range(3):
            for rank in self.ranks:
                rank.step(number)
            self.now += 1.0
        return self

    def verdict(self) -> StallVerdict | None:
        """When every rank's sample has come to the manager, now."""
        for number, rank in enumerate(self.ranks):
            self.manager.add_sample(number, Process("w"), rank.sample(), self.now)
        return self.manager.verdict(self.now, is_complete=True)

    def after(self, still_s: float) -> str:
        """What the verdict says when nobody has marked for so long; beats come all the time."""
        self.now += still_s
        verdict = self.verdict()
        return "" if verdict is None else verdict.text


class TestTheDocumentsFreeze:
    def test_a_loader_that_blocks_in_seven_of_eight(self):
        job = MarkingRanks(8).started()
        with ExitStack() as blocked:
            for rank in job.ranks[1:]:
                blocked.enter_context(rank.phase("validation", 25))
            with job.ranks[0].phase("validation", 25):
                for _ in range(25):
                    job.ranks[0].tick()
                    job.now += 0.1
            blocked.enter_context(job.ranks[0].collective(Number(1, 1), "all_reduce"))
            text = "1-7 behind in validation 0/25, 0 waiting in all_reduce"
            assert [job.after(still_s) for still_s in (55, 10, 3600)] == ["", text, text]

    def test_rank_0_validates_alone_for_longer_than_any_limit(self):
        """The document's cure: the others have declared to wait, and rank 0 moves."""
        job = MarkingRanks(8).started()
        with ExitStack() as waits:
            for rank in job.ranks[1:]:
                waits.enter_context(rank.waiting_for("rank 0 validation"))
                waits.enter_context(rank.collective(Number(1, 1), "broadcast"))
            with job.ranks[0].phase("validation", 195):
                for _ in range(195):
                    assert job.after(50) == ""
                    job.ranks[0].tick()
                assert job.after(251) == "0 behind in validation 195/195, 1-7 waiting in broadcast"

    def test_a_process_that_was_stopped_is_behind_until_something_moves(self):
        """No beat comes from it; its last said that it runs."""
        job = MarkingRanks(4).started()
        with ExitStack() as stuck:
            job.verdict()
            for number in (0, 1, 2):
                stuck.enter_context(job.ranks[number].collective(Number(1, 1), "all_reduce"))
            stopped = job.ranks.pop()
            assert job.after(70) == "3 behind, last seen in step 2, 0-2 waiting in all_reduce; no heartbeat from 3"
            stopped.tick()
            job.ranks.append(stopped)
            assert job.after(1) == ""


def train_healthily(job: MarkingRanks, steps: int, step_s: float, checkpoint_s: float, jitter: random.Random) -> None:
    """Each step all ranks compute and meet; every 50 steps rank 0 writes a checkpoint while the others wait in the next
    collective. The first step takes 20 times as long. Asked for a verdict where the stillness is longest."""
    for step in range(steps):
        for rank in job.ranks:
            rank.step(step)
        if step % 50 == 49:
            with ExitStack() as waits:
                for rank in job.ranks[1:]:
                    waits.enter_context(rank.collective(Number(1, step), "all_reduce"))
                with job.ranks[0].phase("checkpoint"):
                    assert job.after(checkpoint_s * jitter.uniform(0.5, 2.0)) == ""
        compute_s = step_s * jitter.uniform(0.5, 2.0) * (20 if step == 0 else 1)
        slowest = jitter.randrange(len(job.ranks))
        with ExitStack() as waits:
            for number, rank in enumerate(job.ranks):
                if number != slowest:
                    waits.enter_context(rank.collective(Number(1, step + 1), "all_reduce"))
            assert job.after(compute_s) == ""
            with job.ranks[slowest].collective(Number(1, step + 1), "all_reduce"):
                assert job.after(step_s / 10) == ""


@settings(max_examples=10)
@given(st.integers(1, 5), st.floats(0.01, 14), st.floats(1, 300), st.randoms(use_true_random=False))
def test_no_healthy_run_is_a_stall(size: int, step_s: float, checkpoint_s: float, jitter: random.Random):
    train_healthily(MarkingRanks(size), 151, step_s, checkpoint_s, jitter)


@settings(max_examples=15)
@given(st.data())
def test_whoever_blocks_is_named_and_nobody_else(data: st.DataObject):
    """After some healthy steps, drawn ranks block before their next collective."""
    size = data.draw(st.integers(2, 8))
    stuck = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    job = MarkingRanks(size)
    steps = data.draw(st.integers(2, 5))
    train_healthily(job, steps, 1.0, 1.0, random.Random(data.draw(st.integers(0, 99))))
    with ExitStack() as waits:
        for number, rank in enumerate(job.ranks):
            rank.step(steps)
            if number not in stuck:
                waits.enter_context(rank.collective(Number(1, steps + 1), "all_reduce"))
        job.now += 61
        verdict = job.verdict()
    assert verdict is not None
    assert verdict.kind is Kind.BEHIND
    assert {name.group_rank for name in verdict.behind} == stuck
