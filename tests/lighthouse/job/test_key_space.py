"""The fenced key space: a rank in another generation neither reads nor writes, and memory is flat."""

import pytest

from lighthouse.job import records
from lighthouse.job.records import KeySpaces
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import InvalidRequest, LimitReached, UnknownName, WrongState

KIND = KeyKind.ITERATION


def spaces(number: int = 100) -> KeySpaces:
    found = KeySpaces()
    found.begin_space(number)
    return found


def test_what_was_put_is_read():
    found = spaces()
    assert found.put_row(100, KIND, "x", b"1") == (100, KIND, "x", b"1")
    assert found.present_keys() == found.present_keys(100) == {(KIND, "x"): b"1"}


@pytest.mark.parametrize("other", [99, 101, -1])
def test_another_generation_neither_reads_nor_writes(other: int):
    """A key of before is not there after: a readiness key needs no clearing."""
    found = spaces(99)
    found.put_row(99, KIND, "x", b"old")
    found.begin_space(100)
    for act in (lambda: found.present_keys(other), lambda: found.put_row(other, KIND, "x", b"new")):
        with pytest.raises(WrongState, match="generation 100"):
            act()
    assert found.present_keys() == {}


def test_whoever_is_in_the_present_generation_reads_what_earlier_ones_left():
    """Generations that have set nothing do not count: a function may fail at once, again and again."""
    found = KeySpaces()
    for number, name, value in ((0, "a", b"0"), (1, "b", b"1"), (2, "a", b"2")):
        found.begin_space(number)
        found.put_row(number, KIND, name, value)
    for number in range(3, 20):
        found.begin_space(number)
    found.put_row(19, KIND, "a", b"19")
    assert found.previous_keys(19) == found.previous_keys() == {(KIND, "a"): b"2", (KIND, "b"): b"1"}
    assert found.keys_of(1, 19) == {(KIND, "b"): b"1"}
    assert found.keys_of(19) == found.present_keys()
    for act in (lambda: found.previous_keys(18), lambda: found.keys_of(1, 18)):
        with pytest.raises(WrongState, match="generation 19"):
            act()
    with pytest.raises(UnknownName, match=r"of 5 no keys are kept; generations that have keys: 0, 1, 2, 19"):
        found.keys_of(5)


def test_before_the_first_generation_there_is_no_space():
    with pytest.raises(WrongState, match="none yet"):
        KeySpaces().put_row(-1 + 1, KIND, "x", b"1")


def test_old_spaces_are_dropped():
    found = KeySpaces()
    for number in range(10):
        found.begin_space(number)
        found.put_row(number, KIND, "x", b"")
    assert found.generations == [6, 7, 8, 9]


def test_it_is_made_again_from_its_rows():
    found = spaces(7)
    again = KeySpaces(7, [found.put_row(7, KIND, "a", b"1"), found.put_row(7, KeyKind.JOB_RESTART, "b", b"2")])
    assert again.present_keys() == found.present_keys() != {}


def test_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "MAX_KEYS", 2)
    found = spaces()
    for name, value in (("", b""), ("x" * 257, b""), ("x", b"x" * 4097)):
        with pytest.raises(InvalidRequest):
            found.put_row(100, KIND, name, value)
    found.put_row(100, KIND, "a", b"")
    found.put_row(100, KIND, "b", b"")
    found.put_row(100, KIND, "b", b"again")
    with pytest.raises(LimitReached):
        found.put_row(100, KIND, "c", b"")
