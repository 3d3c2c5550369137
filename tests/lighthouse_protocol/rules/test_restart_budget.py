import pytest

from lighthouse_protocol.messages.run import RunTerms
from lighthouse_protocol.rules.rate_limits import RestartBudget, share_used

TERMS = RunTerms(max_restarts=3, restart_window_s=100.0, restart_delay_s=1.0)


@pytest.mark.parametrize(
    ("lasted_s", "has_stepped", "delays"),
    [
        (0.1, False, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (0.1, True, [0.0] * 7),  # it got somewhere
        (10.0, False, [0.0] * 7),
    ],
)
def test_what_gets_nowhere_waits_twice_as_long_each_time(lasted_s: float, has_stepped: bool, delays: list[float]):
    budget = RestartBudget()
    assert [budget.add_failure(TERMS, 0.0, lasted_s=lasted_s, has_stepped=has_stepped) for _ in delays] == delays


def test_one_that_gets_somewhere_begins_the_delays_anew():
    budget = RestartBudget()
    said = [budget.add_failure(TERMS, 0.0, lasted_s=0.0, has_stepped=steps) for steps in (False, False, True, False)]
    assert said == [1.0, 2.0, 0.0, 1.0]


def test_failures_leave_the_window():
    budget = RestartBudget()
    for at in (0.0, 40.0, 80.0, 101.0, 141.0):
        budget.add_failure(TERMS, at, lasted_s=0.0, has_stepped=True)
        assert not budget.why_exhausted(TERMS)
    budget.add_failure(TERMS, 150.0, lasted_s=0.0, has_stepped=True)
    assert budget.why_exhausted(TERMS) == "max_restarts: 3 restarts within 100 s are used up"
    assert RestartBudget(budget.failed_at).why_exhausted(TERMS)  # as another lighthouse reads them


@pytest.mark.parametrize(("most", "failures"), [(0, 1), (1, 2), (20, 21)])
def test_one_more_than_the_budget_is_the_end(most: int, failures: int):
    terms = RunTerms(max_restarts=most)
    budget = RestartBudget()
    for count in range(1, failures + 1):
        assert budget.add_failure(terms, 0.0, lasted_s=0.0, has_stepped=False) == 0.0
        assert bool(budget.why_exhausted(terms)) == (count == failures)


def test_no_budget_keeps_nothing():
    budget = RestartBudget()
    for _ in range(1000):
        budget.add_failure(RunTerms(), 0.0, lasted_s=0.0, has_stepped=False)
    assert (budget.failed_at, budget.why_exhausted(RunTerms())) == ((), "")


def test_how_much_of_a_budget_is_used_falls_as_failures_leave_the_window():
    budget = RestartBudget()
    assert budget.used_share(TERMS, 0.0) == budget.used_share(RunTerms(max_restarts=None), 0.0) == 0.0
    for at in (0.0, 40.0):
        budget.add_failure(TERMS, at, lasted_s=0.0, has_stepped=True)
    assert [round(budget.used_share(TERMS, now), 2) for now in (50.0, 120.0, 200.0)] == [0.67, 0.33, 0.0]


def test_a_budget_of_none_is_used_up_by_the_first_failure():
    assert [share_used(restarts, 0) for restarts in (0, 1)] == [0.0, 1.0]
