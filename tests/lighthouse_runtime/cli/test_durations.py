"""Lengths of time as people write and read them."""

import re

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_runtime.cli.terminal import Duration, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5.0), ("5", 5.0), ("2m", 120.0), ("1h", 3600.0), ("0.1ms", 0.0001), (" 5 s ", 5.0), ("-1s", -1.0)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 parsecs", "1e3", "nan", "inf", "1,5s", "1m30s", "0x5", "٥s", "9" * 19])
def test_what_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write for example 500ms, 5s or 2m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.44, "0.4s"),
        (9.94, "9.9s"),
        (9.95, "10s"),
        (59.6, "1m00s"),
        (3599.6, "1h00m"),
        (86399.9, "1d00h"),
    ],
)
def test_a_duration_is_shown_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_what_is_shown_is_short_and_near(seconds: float) -> None:
    shown = format_duration(seconds)
    assert len(shown) <= 9
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    total = sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", shown))
    smallest = 0.1 if "." in shown else units[shown[-1]]
    assert abs(total - seconds) <= smallest + 1e-6 * seconds


@given(st.integers(1, 10**9))
def test_milliseconds_are_exact(number: int) -> None:
    assert parse_duration(f"{number}ms") == number / 1000


@pytest.mark.parametrize("value", ["0", "0ms", "-1s", 0.0, -1, float("nan"), float("inf")])
def test_an_option_wants_more_than_0(value: str | float) -> None:
    with pytest.raises(click.BadParameter, match="must be more than 0, for example 500ms, 5s or 2m"):
        Duration().convert(value, None, None)
    assert Duration().convert(60.0, None, None) == 60.0
