"""The fenced key space: who is in another generation neither reads nor writes, and memory is flat."""

import pytest

from lighthouse.runs.rules import key_space
from lighthouse.runs.rules.key_space import KeySpaces
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import InvalidRequest, LimitReached, UnknownName, WrongState

KIND = KeyKind.ITERATION


def spaces(number: int = 100) -> KeySpaces:
    found = KeySpaces()
    found.advance(number)
    return found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (KeyKind.ITERATION, "iteration_100_x"),
        (KeyKind.JOB_RESTART, "job_restart_100_x"),
        (KeyKind.RANKS_RESTART, "ranks_restart_100_x"),
    ],
)
def test_the_documents_names(kind: KeyKind, text: str):
    found = spaces()
    found.put(100, kind, "x", b"1")
    assert list(found.list_all()) == [(text, b"1")]


def test_what_was_put_is_read():
    found = spaces()
    assert found.put(100, KIND, "x", b"1") == (100, KIND, "x", b"1")
    assert found.get(100, KIND, "x") == b"1"
    with pytest.raises(UnknownName, match="iteration_100_y"):
        found.get(100, KIND, "y")


def test_add():
    found = spaces()
    assert [found.add(100, KIND, "n", amount)[0] for amount in (1, 5, -2)] == [1, 6, 4]
    assert found.get(100, KIND, "n") == b"4"
    found.put(100, KIND, "text", b"four")
    with pytest.raises(WrongState, match="not a number"):
        found.add(100, KIND, "text", 1)


@pytest.mark.parametrize("other", [99, 101, -1])
def test_another_generation_neither_reads_nor_writes(other: int):
    found = spaces(99)
    found.put(99, KIND, "x", b"old")
    found.advance(100)
    for act in (
        lambda: found.get(other, KIND, "x"),
        lambda: found.put(other, KIND, "x", b"new"),
        lambda: found.add(other, KIND, "x", 1),
    ):
        with pytest.raises(WrongState, match="generation 100"):
            act()
    assert list(found.list_all()) == [("iteration_99_x", b"old")]


def test_before_the_first_generation_there_is_no_space():
    with pytest.raises(WrongState, match="none yet"):
        KeySpaces().put(-1 + 1, KIND, "x", b"1")


def test_a_key_of_before_is_not_there_after():
    """So a readiness key needs no clearing."""
    found = spaces(0)
    found.put(0, KIND, "ready", b"1")
    found.advance(1)
    with pytest.raises(UnknownName):
        found.get(1, KIND, "ready")


def test_old_spaces_are_dropped():
    found = KeySpaces()
    for number in range(10):
        found.advance(number)
        found.put(number, KIND, "x", b"")
    assert found.generations == [6, 7, 8, 9]


def test_it_is_made_again_from_its_rows():
    found = spaces(7)
    rows = [found.put(7, KIND, "a", b"1"), found.add(7, KeyKind.JOB_RESTART, "b", 2)[1]]
    again = KeySpaces(7, rows)
    assert list(again.list_all()) == list(found.list_all())
    assert again.get(7, KIND, "a") == b"1"


def test_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(key_space, "MAX_KEYS", 2)
    found = spaces()
    for name, value in (("", b""), ("x" * 257, b""), ("x", b"x" * 4097)):
        with pytest.raises(InvalidRequest):
            found.put(100, KIND, name, value)
    found.put(100, KIND, "a", b"")
    found.put(100, KIND, "b", b"")
    found.put(100, KIND, "b", b"again")
    with pytest.raises(LimitReached):
        found.put(100, KIND, "c", b"")
