"""The lines about what others have cost a step."""

from agent_client.step.rules.news import LOSS_HELD_S, Loss, StepNews

LOST_B = Loss("b", "rank 1 has ended", step=1541, at=100.0)


def test_a_loss_is_told_with_the_step_that_is_redone():
    news = StepNews()
    assert news.lost(LOST_B) == ""
    assert news.take_overdue(100.1) == ""
    assert news.committed(1541, ["a", "c"], 100.05) == [
        "lost b (rank 1 has ended); step 1541 redone without it after 50 ms"
    ]
    assert news.committed(1542, ["a", "c"], 101.0) == []


def test_a_group_that_is_back_at_once_is_in_the_redone_step():
    news = StepNews()
    news.lost(LOST_B)
    assert news.committed(1541, ["a", "b"], 101.5) == ["lost b (rank 1 has ended); step 1541 redone after 1.5 s"]


def test_a_loss_does_not_wait_for_a_quorum_that_takes_long():
    news = StepNews()
    news.lost(LOST_B)
    assert news.take_overdue(100.0 + LOSS_HELD_S) == "step 1541 discarded: lost b (rank 1 has ended)"
    assert news.take_overdue(100.0 + LOSS_HELD_S) == ""
    assert news.committed(1541, ["a"], 110.0) == []


def test_each_of_two_losses_is_told():
    news = StepNews()
    news.lost(LOST_B)
    assert news.lost(Loss("c", "killed", 1541, 100.5)) == "step 1541 discarded: lost b (rank 1 has ended)"
    assert news.flush() == "step 1541 discarded: lost c (killed)"
    assert news.flush() == ""


def test_a_step_that_waits_for_a_heal_says_so_and_what_that_took():
    news = StepNews()
    assert news.heal_begins(17, ["b", "c"], 10.0) == "step 17 waits for b, c to heal"
    assert news.committed(17, ["a", "b", "c"], 51.0) == ["b, c healed; step 17 took 41 s"]


def test_a_heal_whose_step_failed_is_not_told_as_done():
    news = StepNews()
    news.heal_begins(17, ["b"], 10.0)
    news.flush()
    assert news.committed(17, ["a", "b"], 51.0) == []
    news.heal_begins(17, ["b"], 60.0)
    news.lost(Loss("b", "its connection was lost", 17, 71.0))
    assert news.committed(17, ["a"], 71.029) == [
        "lost b (its connection was lost); step 17 redone without it after 29 ms"
    ]
