"""When a wait for a quorum is worth a line."""

from lighthouse_protocol.rules.quorum_change import (
    ASKED_AGAIN_WITHIN_S,
    CHANGED_AFTER_S,
    LOOKED_EVERY_S,
    REPEATED_AFTER_S,
    SAID_AFTER_S,
    QuorumWait,
)


def begun(at: float = 0.0) -> QuorumWait:
    wait = QuorumWait()
    wait.begin(at)
    return wait


def test_a_round_says_nothing():
    wait = begun()
    assert (wait.next_at(0), wait.news("b", SAID_AFTER_S - 0.01)) == (SAID_AFTER_S, "")
    assert wait.answered(SAID_AFTER_S - 0.01) == ""
    assert (wait.next_at(9), wait.news("b", 9)) == (None, "")


def test_one_that_lasts_is_said_within_ten_seconds_and_its_end_too():
    assert SAID_AFTER_S + LOOKED_EVERY_S <= 10
    wait = begun(100)
    assert wait.news("b", 105) == "no quorum for 5 s: waiting for b"
    assert wait.answered(112) == "there is a quorum, after 12 s"
    assert wait.answered(113) == ""


def test_the_same_is_said_every_minute_and_what_is_new_before():
    wait = begun()
    assert wait.news("b", SAID_AFTER_S)
    said_at = SAID_AFTER_S
    assert wait.news("c", said_at + CHANGED_AFTER_S - 0.01) == ""
    assert wait.news("b", said_at + CHANGED_AFTER_S) == ""
    assert wait.next_at(said_at) == said_at + CHANGED_AFTER_S
    assert wait.next_at(said_at + 20) == said_at + 20 + LOOKED_EVERY_S
    assert wait.news("b", said_at + REPEATED_AFTER_S) == "no quorum for 65 s: waiting for b"
    assert wait.news("c", said_at + REPEATED_AFTER_S + CHANGED_AFTER_S) == "no quorum for 75 s: waiting for c"


def test_a_request_that_is_asked_again_goes_on_waiting():
    wait = begun()
    wait.leave(4)
    assert (wait.next_at(4), wait.news("b", 90)) == (None, "")
    wait.begin(4 + ASKED_AGAIN_WITHIN_S)
    assert wait.news("b", 7) == "no quorum for 7 s: waiting for b"
    wait.leave(8)
    wait.leave(60)
    wait.begin(8 + ASKED_AGAIN_WITHIN_S + 0.01)
    assert wait.next_at(11) == 8 + ASKED_AGAIN_WITHIN_S + 0.01 + SAID_AFTER_S, "another wait"


def test_many_requests_are_one_wait():
    wait = begun(1)
    wait.begin(3)
    assert wait.next_at(3) == 1 + SAID_AFTER_S
