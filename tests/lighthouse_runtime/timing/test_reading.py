import threading

import pytest

from lighthouse_protocol.refusals import DeadlinePassed, WrongState
from lighthouse_runtime.timing.pacing import BackgroundRead


def test_what_was_read_is_returned() -> None:
    assert BackgroundRead("x", lambda: 7, 60).result() == 7


def test_its_error_is_raised_where_it_is_waited_for() -> None:
    def fail() -> int:
        raise WrongState("no")

    with pytest.raises(WrongState, match="no"):
        BackgroundRead("x", fail, 60).result()


def test_one_that_hangs_ends_at_its_deadline_and_holds_nothing_up() -> None:
    never = threading.Event()
    reading = BackgroundRead("x", never.wait, 0.05)
    with pytest.raises(DeadlinePassed, match=r"no answer within 0\.05 s"):
        reading.result()
    never.set()
