import click
import pytest

from lighthouse_runtime.cli.durations import Duration, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("500ms", 0.5), ("9ms", 0.009), ("2m", 120), ("1.5h", 5400), ("7", 7), ("0.25", 0.25), (" 5 s ", 5)],
)
def test_reads(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5d", "1e3", "nan", "inf", "5 s s", "٥s", "1m30s"])
def test_refuses_with_an_example(text):
    with pytest.raises(ValueError, match="for example 500ms, 5s or 2m"):
        parse_duration(text)


@pytest.mark.parametrize("value", ["0", "-1s", 0.0, float("inf"), float("nan")])
def test_must_be_finite_and_more_than_0(value):
    with pytest.raises(click.BadParameter, match="must be more than 0, for example"):
        Duration().convert(value, None, None)


def test_0_where_allowed():
    assert Duration(allow_zero=True).convert("0s", None, None) == 0
    with pytest.raises(click.BadParameter, match="must be 0 or more"):
        Duration(allow_zero=True).convert("-1ms", None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.1, "0.0s"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (193, "3m13s"),
        (3599.9, "1h00m"),
        (86399.9, "1d00h"),
        (4 * 86400 + 3 * 3600, "4d03h"),
    ],
)
def test_formats(seconds, text):
    assert format_duration(seconds) == text
