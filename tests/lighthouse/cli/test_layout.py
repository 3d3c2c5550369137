import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.cli.layout import Column, share, shorten, table

COLUMNS = (
    Column("NAME", lambda row: row[0], comfort=10),
    Column("STATE", lambda row: row[1]),
    Column("NOTE", lambda row: row[2], keep=0),
)


def lines(width: int, *rows: tuple[str, str, str]) -> list[str]:
    return [line.plain for line in table(COLUMNS, rows, width)]


def test_all_columns_where_they_fit():
    assert lines(80, ("a", "ok", "x")) == ["NAME  STATE  NOTE", "a     ok     x"]


def test_a_long_name_is_cut_before_a_column_is_left_out():
    assert lines(25, ("replica-group-12", "ok", "x")) == ["NAME          STATE  NOTE", "replic…up-12  ok     x"]


def test_then_the_least_important_column_is_left_out():
    assert lines(18, ("replica-group-12", "ok", "x")) == ["NAME         STATE", "repli…up-12  ok"]


@pytest.mark.parametrize("width", range(1, 40))
def test_no_line_is_longer_than_asked(width):
    assert max(map(len, lines(width, ("replica-group-12", "waiting", "日本語")))) <= width


def test_shorten_keeps_both_ends():
    assert shorten("replica-group-12", 9) == "repl…p-12"
    assert shorten("short", 9) == "short"


@given(st.integers(-5, 100), st.lists(st.integers(0, 40), max_size=8))
def test_share_gives_what_there_is_and_no_more_than_wanted(budget, wants):
    given_out = share(budget, wants)
    assert all(got <= want for got, want in zip(given_out, wants, strict=True))
    assert sum(given_out) <= max(0, budget)
    unmet = [got for got, want in zip(given_out, wants, strict=True) if got < want]
    assert not unmet or budget - sum(given_out) < len(wants)
    assert max(unmet, default=0) - min(unmet, default=0) <= 1
