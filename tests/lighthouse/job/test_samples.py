"""Samples of a job's pace: bounded, and equal to what the status says at that moment."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.progress import EVERY_S, KEPT, RATE_OVER_S, RATE_STEPS, Levels, Pace, Samples, levels_of
from lighthouse.job.status import job_status
from lighthouse_protocol.messages.status import MemberState, RankState
from tests.lighthouse.builders import beat, beating, join, machine, training
from tests.lighthouse.lives import Life, beat_for, formed
from tests.lighthouse.statuses import place
from tests.virtual_loop import VirtualLoop


def at(step: int, groups: int = 2) -> Levels:
    return Levels(step, groups, groups + 1, 0.9)


def sampled(steps: list[int], every_s: float = EVERY_S, groups: int = 2) -> Samples:
    """A sample of each, the last one at 0 s."""
    samples = Samples()
    for ago, step in zip(reversed(range(len(steps))), steps, strict=True):
        samples.add_levels(at(step, groups), -ago * every_s)
    return samples


def rate(samples: Samples, step: int, now: float = 0.0) -> float | None:
    return samples.pace_of(at(step), 0, now).steps_per_s


class TestRate:
    def test_of_one_moment_is_not_known(self):
        assert rate(sampled([]), 7) is None
        assert rate(sampled([7]), 7) is None

    def test_of_fast_steps_is_that_of_the_last_seconds(self):
        assert rate(sampled([0, 10, 20, 30, 40, 140, 240, 340]), 340) == 50.0

    def test_of_slow_steps_is_that_of_the_last_few(self):
        """A step takes 20 s: in the last 5 s there is one, or none."""
        steps = [n // 10 for n in range(100)]
        assert rate(sampled(steps), 9) == 0.05

    def test_falls_while_nothing_moves(self):
        rates = [rate(sampled([0, 10, 20, 30] + [30] * still), 30) for still in range(8)]
        assert rates == sorted(rates, reverse=True, key=lambda found: found or 0)
        assert rates[-1] is not None
        assert 0 < rates[-1] < 1

    def test_begins_anew_where_the_step_goes_back_or_no_group_trains(self):
        assert rate(sampled([900, 1000, 0]), 0) is None
        samples = sampled([0, 0, 0], groups=0)
        samples.add_levels(at(4000), EVERY_S)
        assert rate(samples, 4000, EVERY_S) is None, "a group that comes with 4000 steps has not done them now"
        samples.add_levels(at(4001), 2 * EVERY_S)
        assert rate(samples, 4001, 2 * EVERY_S) == 0.5

    def test_of_a_job_that_no_group_trains_is_none(self):
        assert sampled([7, 7]).pace_of(Levels(7, 0, 1, None), 0, 0.0).steps_per_s == 0.0

    @given(st.lists(st.integers(0, 50), min_size=4, max_size=2 * KEPT))
    def test_is_that_of_the_shortest_time_that_is_enough(self, moves: list[int]):
        steps = [sum(moves[: n + 1]) for n in range(len(moves))]
        past = list(enumerate(reversed(steps)))[:KEPT]
        enough = ((ago, step) for ago, step in past if ago * EVERY_S >= RATE_OVER_S and steps[-1] - step >= RATE_STEPS)
        ago, step = next(enough, past[-1])
        assert rate(sampled(steps), steps[-1]) == round((steps[-1] - step) / (ago * EVERY_S), 3)


def test_the_oldest_samples_are_forgotten():
    pace = sampled(list(range(3 * KEPT))).pace_of(at(3 * KEPT), 0, 0.0)
    columns = [value for value in dataclasses.asdict(pace).values() if isinstance(value, list)]
    assert [len(column) for column in columns] == [KEPT] * 5
    assert pace.ages_s[0] == (KEPT - 1) * EVERY_S


class TestLevels:
    def test_are_those_of_the_status(self):
        m = training("abc", join_timeout_s=10, heartbeat_timeout_s=5)
        m.handle(beat("z"), now=0)
        m.handle(join(4, "a", step=3), now=1)
        for until in (1, 4, 12, 40):
            beating(m, "abz" if until < 40 else "z", 1, until)
            members = job_status("j", m, until).members
            levels = levels_of(m.job, (), 0.98765)
            alive = [member for member in members if member.state is not MemberState.EXPIRED]
            at_work = [member for member in alive if member.is_participant]
            assert (levels.training, levels.alive) == (len(at_work), len(alive))
            assert levels.step == max((member.step for member in at_work), default=0)
            assert levels.goodput == 0.9877

    def test_of_a_run_are_those_of_its_ranks(self):
        ranks = (
            place("r", 0, RankState.RUNNING, generation=3, step=9),
            place("r", 1, RankState.LOST, generation=3, step=12),
            place("r", 2, RankState.SPARE, step=0),
        )
        assert levels_of(machine().job, ranks, None) == Levels(9, 1, 2, None)


def test_a_drivers_samples_are_its_status_at_that_moment():
    loop = VirtualLoop()
    life = Life(loop, None, min_replicas=2, heartbeat_timeout_s=3)
    driver = life.driver
    assert driver.current_pace() == Pace(0, 0, 0, None, 0.0, 0, [], [], [], [], [])
    managers = formed(life, "ab")
    seen: list[tuple[int, int]] = []
    for held in (managers, managers, managers[:1], managers[:1], managers[:1]):
        driver.take_sample()
        alive = [member for member in driver.status().members if member.state is not MemberState.EXPIRED]
        seen.append((sum(member.is_participant for member in alive), len(alive)))
        now = driver.current_pace()
        assert (now.training, now.alive) == seen[-1] == (now.training_then[-1], now.alive_then[-1])
        assert (now.goodput, now.steps_per_s) == (now.goodput_then[-1], now.steps_per_s_then[-1])
        beat_for(loop, held, EVERY_S)
    pace = driver.current_pace()
    assert list(zip(pace.training_then, pace.alive_then, strict=True)) == seen
    assert {alive for _, alive in seen} == {1, 2}, "b is lost meanwhile"
    assert pace.ages_s == [10.0, 8.0, 6.0, 4.0, 2.0]
