"""Which ranks count as slow: by what they compute, against their peers, for a while; and never for waiting."""

import statistics
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.slow_ranks import (
    COMPARISONS,
    MAX_RATIO,
    MIN_EXCESS_S,
    SLOW_AFTER_S,
    Slowness,
    SlowRanks,
    peer_medians,
)
from lighthouse_protocol.messages.progress import ComputeTotals, GroupView, RankName
from tests.lighthouse_protocol.views import rank

EVERY_S = SLOW_AFTER_S / COMPARISONS
B = RankName("b", 0)


@dataclass
class Job:
    """Groups of one rank. All do a step in `step_s`, of which each computes a part and waits for the rest."""

    compute_s: dict[str, float]
    step_s: float = 0.5
    now: float = 1000.0
    incarnations: dict[str, str] = field(default_factory=dict[str, str])
    totals: dict[str, ComputeTotals] = field(default_factory=dict[str, ComputeTotals])
    slow: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.ranks = SlowRanks()
        self.go(0.0)

    def go(self, for_s: float) -> list[str]:
        """Return the slow ranks after that time. Heartbeats arrive twice a second."""
        for _ in range(round(2 * for_s) or 1):
            self.now += 0.5
            for name, compute_s in self.compute_s.items():
                self.add(name, 0.5 / self.step_s * compute_s, 1)
            if self.ranks.is_due(self.now):
                self.slow = [str(name) for name in self.ranks.compare(map(self.view, self.compute_s), self.now)]
        return self.slow

    def add(self, name: str, seconds: float, microbatches: int) -> None:
        before = self.totals.get(name, ComputeTotals())
        self.totals[name] = ComputeTotals(before.seconds + seconds, before.microbatches + microbatches)

    def view(self, name: str) -> GroupView:
        place = rank(0, group=name)
        sample = replace(place.sample, computed=self.totals[name])
        return GroupView(name, "i", (replace(place, sample=sample, rank_incarnation=self.incarnations.get(name, "1")),))


def test_a_rank_that_computes_half_again_as_long_as_its_peers_is_slow_after_a_minute():
    job = Job({"a": 0.2, "b": 0.31, "c": 0.2})
    assert job.go(SLOW_AFTER_S - EVERY_S) == []
    assert job.go(EVERY_S + 1) == ["b/0"]
    slowness = job.ranks.slowness(B)
    assert slowness == (pytest.approx(1.55, abs=0.01), pytest.approx(1.55, abs=0.01), True)
    assert job.ranks.slowness(RankName("a", 0)) == (pytest.approx(0.78, abs=0.01), pytest.approx(0.78, abs=0.01), False)


def test_its_text_gives_both_times():
    job = Job({"a": 0.2, "b": 0.4, "c": 0.2})
    job.go(2 * SLOW_AFTER_S)
    [slow] = job.ranks.compare(map(job.view, job.compute_s), job.now).values()
    assert slow.text == "b/0 is slow: it computes for 0.4 s per microbatch, its peers for 0.2 s (median)"
    assert slow.since == pytest.approx(1000.5)


def test_it_recovers_a_minute_after_it_computes_as_its_peers_do():
    job = Job({"a": 0.2, "b": 0.6, "c": 0.2})
    assert job.go(2 * SLOW_AFTER_S) == ["b/0"]
    job.compute_s["b"] = 0.27  # not slow enough to be called slow, and not as fast as its peers
    assert job.go(3 * SLOW_AFTER_S) == ["b/0"]
    job.compute_s["b"] = 0.2
    assert job.go(SLOW_AFTER_S - EVERY_S) == ["b/0"]
    assert job.go(EVERY_S + 1) == []


def test_the_last_10_minutes_remember_what_the_last_minute_has_forgotten():
    job = Job({"a": 0.2, "b": 0.6, "c": 0.2})
    job.go(300)
    job.compute_s["b"] = 0.2
    job.go(240)
    minute, ten, _ = job.ranks.slowness(B)
    assert minute is not None
    assert ten is not None
    assert minute < 1.1
    assert 1.5 < ten < 2.5


def test_a_thousand_equal_steps_and_one_that_takes_90_s_raise_nothing():
    job = Job({"a": 0.2, "b": 0.21, "c": 0.19, "d": 0.2})
    for _ in range(20):
        assert job.go(25) == []
    job.add("b", 90.0, 1)  # one step with a checkpoint in it
    assert job.go(300) == []


def test_a_rank_that_is_slow_in_every_other_comparison_is_not_slow():
    job = Job({"a": 0.2, "b": 0.2, "c": 0.2})
    for turn in range(20):
        job.compute_s["b"] = 0.2 if turn % 4 == 3 else 0.4
        assert job.go(EVERY_S) == []


def test_less_than_the_noise_of_a_busy_host_is_not_slow():
    job = Job({"a": 0.004, "b": 0.004 + 0.9 * MIN_EXCESS_S, "c": 0.004})
    assert job.go(300) == []


def test_with_fewer_than_two_peers_no_rank_is_judged():
    job = Job({"a": 0.1, "b": 0.5})
    assert job.go(300) == []
    assert job.ranks.slowness(B) == Slowness()


def test_a_slow_rank_whose_peers_are_gone_is_no_longer_called_slow():
    job = Job({"a": 0.2, "b": 0.6, "c": 0.2})
    assert job.go(100) == ["b/0"]
    del job.compute_s["a"]
    assert job.go(EVERY_S + 1) == []


def test_a_new_process_is_measured_from_its_first_report():
    job = Job({"a": 0.2, "b": 0.6, "c": 0.2})
    assert job.go(100) == ["b/0"]
    job.incarnations["b"], job.totals["b"], job.compute_s["b"] = "2", ComputeTotals(1.0, 1), 0.2
    assert job.go(EVERY_S + 1) == []
    assert job.go(300) == []


def test_a_ratio_to_peers_that_report_no_time_is_a_number():
    job = Job({"a": 1e-300, "b": 1e9, "c": 1e-300})
    job.go(SLOW_AFTER_S)
    assert job.ranks.slowness(B)[:2] == (MAX_RATIO, MAX_RATIO)


def test_totals_that_decrease_are_a_new_beginning():
    job = Job({"a": 0.2, "b": 0.2, "c": 0.2})
    job.go(100)
    job.totals["b"] = ComputeTotals(0.0, 0)
    assert job.go(100) == []
    assert all(s.ratio_1m == pytest.approx(1.0, abs=0.01) for s in job.ranks.list_slowness())


def test_a_rank_without_a_new_step_is_not_judged():
    """All wait for a quorum after three slow comparisons: that is not the fourth."""
    job = Job({"a": 0.2, "b": 0.6, "c": 0.2})
    assert job.go(SLOW_AFTER_S - EVERY_S) == []
    before, job.compute_s = job.compute_s, dict.fromkeys("abc", 0.0)
    for _ in range(300):
        job.now += 1
        if job.ranks.is_due(job.now):
            assert not job.ranks.compare(map(job.view, before), job.now)


def test_only_ranks_at_the_same_position_are_peers():
    """Rank 1 of each group does more than rank 0, as in a pipeline."""
    ranks, now = SlowRanks(), 0.0
    for step in range(200):
        now += 1
        views = [
            GroupView(name, "i", tuple(_computed(name, number, step * (1 + 2 * number), step) for number in range(2)))
            for name in "abc"
        ]
        if ranks.is_due(now):
            assert not ranks.compare(views, now)
    assert ranks.slowness(RankName("b", 1)).ratio_1m == 1.0


def _computed(name: str, number: int, seconds: float, microbatches: int):
    place = rank(number, group=name)
    return replace(place, sample=replace(place.sample, computed=ComputeTotals(seconds, microbatches)))


values = st.lists(st.none() | st.floats(0.001, 100.0), max_size=12)


@given(values)
def test_a_median_is_that_of_the_others(values: list[float | None]):
    for place, median in enumerate(peer_medians(values)):
        others = [value for other, value in enumerate(values) if other != place and value is not None]
        if values[place] is None or len(others) < 2:
            assert median is None
        else:
            assert median == pytest.approx(statistics.median(others))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 0.14), min_size=3), st.integers(0, 300))
def test_ranks_that_differ_by_less_than_half_are_never_slow(compute_s: dict[str, float], for_s: int):
    assert Job(compute_s).go(for_s) == []
