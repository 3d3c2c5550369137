"""When a wait for a quorum is worth a line."""

from lighthouse_protocol.rules.quorum_change import (
    CHANGED_AFTER_S,
    CHECKED_EVERY_S,
    LOGGED_AFTER_S,
    REPEATED_AFTER_S,
    RETRIED_WITHIN_S,
    QuorumWait,
)


def begun(at: float = 0.0) -> QuorumWait:
    wait = QuorumWait()
    wait.begin(at)
    return wait


def test_a_round_says_nothing():
    wait = begun()
    assert (wait.next_at(0), wait.next_line("b", LOGGED_AFTER_S - 0.01)) == (LOGGED_AFTER_S, "")
    assert wait.finish(LOGGED_AFTER_S - 0.01) == ""
    assert (wait.next_at(9), wait.next_line("b", 9)) == (None, "")


def test_one_that_lasts_is_said_within_ten_seconds_and_its_end_too():
    assert LOGGED_AFTER_S + CHECKED_EVERY_S <= 10
    wait = begun(100)
    assert wait.next_line("b", 105) == "no quorum for 5 s: waiting for b"
    assert wait.finish(112) == "there is a quorum, after 12 s"
    assert wait.finish(113) == ""


def test_the_same_is_said_every_minute_and_what_is_new_before():
    wait = begun()
    assert wait.next_line("b", LOGGED_AFTER_S)
    said_at = LOGGED_AFTER_S
    assert wait.next_line("c", said_at + CHANGED_AFTER_S - 0.01) == ""
    assert wait.next_line("b", said_at + CHANGED_AFTER_S) == ""
    assert wait.next_at(said_at) == said_at + CHANGED_AFTER_S
    assert wait.next_at(said_at + 20) == said_at + 20 + CHECKED_EVERY_S
    assert wait.next_line("b", said_at + REPEATED_AFTER_S) == "no quorum for 65 s: waiting for b"
    assert wait.next_line("c", said_at + REPEATED_AFTER_S + CHANGED_AFTER_S) == "no quorum for 75 s: waiting for c"


def test_a_request_that_is_asked_again_goes_on_waiting():
    wait = begun()
    wait.pause(4)
    assert (wait.next_at(4), wait.next_line("b", 90)) == (None, "")
    wait.begin(4 + RETRIED_WITHIN_S)
    assert wait.next_line("b", 7) == "no quorum for 7 s: waiting for b"
    wait.pause(8)
    wait.pause(60)
    wait.begin(8 + RETRIED_WITHIN_S + 0.01)
    assert wait.next_at(11) == 8 + RETRIED_WITHIN_S + 0.01 + LOGGED_AFTER_S, "another wait"


def test_many_requests_are_one_wait():
    wait = begun(1)
    wait.begin(3)
    assert wait.next_at(3) == 1 + LOGGED_AFTER_S
