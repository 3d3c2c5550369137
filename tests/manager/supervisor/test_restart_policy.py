"""What the end of a rank means, and what is answered to a loss."""

import dataclasses
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, Superseded, WrongState
from manager.supervisor.rules.restart_policy import (
    DUPLICATE_TIMEOUT_S,
    Decision,
    Exclude,
    GiveUp,
    Outcome,
    Report,
    Restart,
    RestartBudget,
    RestartPolicy,
    describe_status,
    outcome,
)

PLAIN = RestartPolicy(max_startup_failures=0)


def lose(policy: RestartPolicy, *losses: tuple[float, float], host: int = 0, drawn: float = 1.0) -> list[Decision]:
    """Losses as (when, how long after the start)."""
    budget = RestartBudget(policy, lambda: drawn)
    return [budget.record_loss(host, lived_s, at) for at, lived_s in losses]


def test_what_an_end_means() -> None:
    """The abort code is an option. A death by SIGINT is no exit code, and means what it means."""
    done, lost, abort = Outcome.DONE, Outcome.LOST, Outcome.ABORT
    for code, meanings in {130: (done, abort, lost, abort), 77: (done, lost, abort, abort)}.items():
        assert tuple(outcome(status, code) for status in (0, 130, 77, -signal.SIGINT)) == meanings
    assert outcome(0, stop_exit_code=0) is done
    signals = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM)
    assert {outcome(status, stop_exit_code=130) for status in (1, 2, 137, *signals)} == {lost}


def test_an_end_is_named() -> None:
    assert [describe_status(status) for status in (0, 1, -11, -9, -64)] == [
        "exit code 0",
        "exit code 1",
        "SIGSEGV",
        "SIGKILL (kill -9, or the kernel was out of memory)",
        "SIGRTMAX",
    ]
    assert describe_status(-100) == "signal 100"


class TestBudget:
    def test_each_restart_waits_twice_as_long_up_to_a_bound(self) -> None:
        policy = dataclasses.replace(PLAIN, max_restarts=5, delay_s=1.0, max_delay_s=5.0)
        decisions = lose(policy, *((100.0 * i, 60.0) for i in range(5)))
        assert decisions == [Restart(1.0), Restart(2.0), Restart(4.0), Restart(5.0), Restart(5.0)]

    def test_jitter_takes_up_to_half(self) -> None:
        assert lose(PLAIN, (0.0, 60.0), drawn=0.0) == [Restart(0.25)]

    def test_what_left_the_window_counts_no_more(self) -> None:
        policy = dataclasses.replace(PLAIN, max_restarts=1, window_s=10.0)
        decisions = lose(policy, (0, 60), (10, 60), (19.9, 60))
        assert [type(decision) for decision in decisions] == [Restart, Restart, GiveUp]

    def test_how_much_of_it_is_used(self) -> None:
        budget = RestartBudget(RestartPolicy(max_restarts=4, window_s=100.0, max_startup_failures=0), lambda: 1.0)
        for at in (0.0, 50.0):
            budget.record_loss(0, 60.0, at)
        assert [budget.used(now) for now in (60.0, 120.0, 150.0)] == [0.5, 0.25, 0.0]

    def test_a_longer_life_between_them_begins_anew(self) -> None:
        policy = RestartPolicy(max_restarts=9, max_startup_failures=2, startup_s=10.0)
        decisions = lose(policy, (0, 1), (10, 10), (20, 1), (30, 1))
        assert [type(decision) for decision in decisions] == [Restart, Restart, Restart, GiveUp]

    def test_a_host_that_is_the_first_to_fail_again_and_again_is_excluded(self) -> None:
        budget = RestartBudget(dataclasses.replace(PLAIN, max_restarts=9, exclude_host_after=2), lambda: 0.5)
        decisions = [budget.record_loss(host, 60.0, at) for at, host in enumerate((0, 1, 0, 1, 1))]
        assert [type(decision) for decision in decisions] == [Restart] * 4 + [Exclude]
        assert decisions[-1] == Exclude(1, "it was the first to fail 2 times in a row")


@pytest.mark.parametrize("misfits", [(True, True, True), (True, False, False), (False, False, True), (False,) * 3])
def test_a_misfit_uses_the_budget_up_and_is_no_fault_of_the_others(misfits: tuple[bool, ...]) -> None:
    """Losses of a group that does not fit its peers. Where the budget is exhausted without them, it is for all."""
    budget = RestartBudget(dataclasses.replace(PLAIN, max_restarts=2), lambda: 1.0)
    *restarts, last = [budget.record_loss(0, 60.0, at, is_misfit=is_misfit) for at, is_misfit in enumerate(misfits)]
    why = "the budget of 2 restarts within 3600 s is exhausted"
    if any(misfits):
        why += f", {sum(misfits)} of them because this group does not fit its peers"
    assert [type(restart) for restart in restarts] == [Restart, Restart]
    assert last == GiveUp(why, is_for_all=not any(misfits))


@given(
    policy=st.builds(
        RestartPolicy,
        max_restarts=st.integers(0, 5),
        window_s=st.floats(1, 100),
        delay_s=st.floats(0.01, 10),
        max_delay_s=st.floats(0.01, 100),
        max_startup_failures=st.integers(0, 4),
        startup_s=st.floats(0.1, 20),
        exclude_host_after=st.integers(0, 4),
    ),
    losses=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 30), st.integers(0, 2)), min_size=1, max_size=20),
    drawn=st.floats(0, 1),
)
def test_no_window_has_more_restarts_than_the_budget(
    policy: RestartPolicy, losses: list[tuple[float, float, int]], drawn: float
) -> None:
    budget, now, restarts = RestartBudget(policy, lambda: drawn), 0.0, list[float]()
    for after_s, lived_s, host in losses:
        now += after_s
        decision = budget.record_loss(host, lived_s, now)
        if isinstance(decision, Restart):
            assert 0 < decision.after_s <= policy.max_delay_s
            restarts.append(now)
        assert sum(now - at < policy.window_s for at in restarts) <= policy.max_restarts


TAKEN = DuplicateReplica("supervisor g is there")


def silent() -> Report:
    return Report(lambda _: None)


@pytest.mark.parametrize("error", [Superseded("it has a successor"), WrongState("its host is excluded")])
def test_a_refusal_that_no_other_try_mends_is_final(error: LighthouseError):
    assert silent().is_final(error, 0.0)


def test_a_name_that_is_taken_is_asked_for_again_for_a_while():
    """Its predecessor may be gone, and not missed yet."""
    report = silent()
    assert not report.is_final(TAKEN, 7.0)
    assert not report.is_final(TAKEN, 6.9 + DUPLICATE_TIMEOUT_S)
    assert report.is_final(TAKEN, 7.0 + DUPLICATE_TIMEOUT_S)


def test_a_welcome_begins_that_time_anew():
    report = silent()
    assert not report.is_final(TAKEN, 0.0)
    report.begin_stream(1.0)
    report.end_stream(2.0)
    assert not report.is_final(TAKEN, 1.0 + DUPLICATE_TIMEOUT_S)
