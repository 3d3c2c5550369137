"""What a rank logs of its steps, and how long it asks for a quorum."""

import pytest

from agent_client.step.rules.news import (
    FIRST_LOG_AFTER,
    LOG_INTERVAL_S,
    LOSS_HELD_S,
    MAX_BACKOFF_S,
    Loss,
    RetryPolicy,
    StepNews,
)
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    DuplicateReplica,
    InternalError,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotServed,
    Superseded,
    Unreachable,
    Unrecoverable,
    WrongState,
)


@pytest.mark.parametrize("kind", [InvalidRequest, NotServed, Unrecoverable])
def test_what_asking_again_cannot_change_ends_the_rank_at_once(kind: type[LighthouseError]):
    assert RetryPolicy(30).record_refusal(kind("the reason"), 0.0) == "the reason"


@pytest.mark.parametrize("kind", [WrongState, DuplicateReplica, InternalError])
def test_a_refusal_that_does_not_pass_ends_the_rank(kind: type[LighthouseError]):
    patience = RetryPolicy(3)
    assert [patience.record_refusal(kind("it is odd"), now) for now in range(2)] == ["", ""]
    assert patience.record_refusal(kind("it is odd"), 2) == (
        "3 requests for a quorum refused in a row (max_consecutive_discards): it is odd"
    )


@pytest.mark.parametrize("between", [None, DeadlinePassed("too few"), Unreachable("it starts again")])
def test_only_refusals_in_a_row_are_counted(between: LighthouseError | None):
    patience = RetryPolicy(2)
    for now in range(20):
        assert patience.record_refusal(WrongState("a quorum was revoked"), 2 * now) == ""
        if between is None:
            patience.reset()
        else:
            assert patience.record_refusal(between, 2 * now + 1) == ""


@pytest.mark.parametrize("kind", [DeadlinePassed, Unreachable, Superseded, LimitReached])
def test_waiting_never_ends_a_rank_and_is_said_regularly(kind: type[LighthouseError]):
    patience, said, now = RetryPolicy(2), list[tuple[float, str]](), 0.0
    while now < 1800.0:
        error = kind("1 of 2 joined")
        assert patience.record_refusal(error, now) == ""
        assert patience.backoff_s <= MAX_BACKOFF_S
        if news := patience.pop_log_line(error, now):
            said.append((now, news))
        now += 0.2 + patience.backoff_s
    assert patience._tries > 1100  # 2**1100 is no float
    assert said[0][1].startswith(f"no quorum since 1 s, after {FIRST_LOG_AFTER} requests; asking on: 1 of 2 joined")
    gaps = [later - earlier for (earlier, _), (later, _) in zip(said, said[1:], strict=False)]
    assert len(said) >= 29
    assert all(LOG_INTERVAL_S <= gap < LOG_INTERVAL_S + 2 for gap in gaps)


def test_a_quorum_is_the_end_of_it():
    patience = RetryPolicy(3)
    for now in range(5):
        patience.record_refusal(DeadlinePassed("x"), now)
    patience.reset()
    assert patience.record_refusal(DeadlinePassed("x"), 9) == patience.pop_log_line(DeadlinePassed("x"), 9) == ""
    assert patience.backoff_s < 0.1


LOST_B = Loss("b", "rank 1 has ended", step=1541, at=100.0)


def test_a_loss_is_told_with_the_step_that_is_redone():
    news = StepNews()
    assert news.lost(LOST_B) == ""
    assert news.pop_overdue(100.1) == ""
    assert news.describe_commit(1541, ["a", "c"], 100.05) == [
        "lost b (rank 1 has ended); step 1541 redone without it after 50 ms"
    ]
    assert news.describe_commit(1542, ["a", "c"], 101.0) == []


def test_a_group_that_is_back_at_once_is_in_the_redone_step():
    news = StepNews()
    news.lost(LOST_B)
    assert news.describe_commit(1541, ["a", "b"], 101.5) == ["lost b (rank 1 has ended); step 1541 redone after 1.5 s"]


def test_a_loss_does_not_wait_for_a_quorum_that_takes_long():
    news = StepNews()
    news.lost(LOST_B)
    assert news.pop_overdue(100.0 + LOSS_HELD_S) == "step 1541 discarded: lost b (rank 1 has ended)"
    assert news.pop_overdue(100.0 + LOSS_HELD_S) == ""
    assert news.describe_commit(1541, ["a"], 110.0) == []


def test_each_of_two_losses_is_told():
    news = StepNews()
    news.lost(LOST_B)
    assert news.lost(Loss("c", "killed", 1541, 100.5)) == "step 1541 discarded: lost b (rank 1 has ended)"
    assert news.flush() == "step 1541 discarded: lost c (killed)"
    assert news.flush() == ""


def test_a_step_that_waits_for_a_heal_says_so_and_what_that_took():
    news = StepNews()
    assert news.heal_begins(17, ["b", "c"], 10.0) == "step 17 waits for b, c to heal"
    assert news.describe_commit(17, ["a", "b", "c"], 51.0) == ["b, c healed; step 17 took 41 s"]


def test_a_heal_whose_step_failed_is_not_told_as_done():
    news = StepNews()
    news.heal_begins(17, ["b"], 10.0)
    news.flush()
    assert news.describe_commit(17, ["a", "b"], 51.0) == []
    news.heal_begins(17, ["b"], 60.0)
    news.lost(Loss("b", "its connection was lost", 17, 71.0))
    assert news.describe_commit(17, ["a"], 71.029) == [
        "lost b (its connection was lost); step 17 redone without it after 29 ms"
    ]
