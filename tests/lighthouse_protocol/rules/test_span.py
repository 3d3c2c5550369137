"""Lengths of time in words, with three digits at most."""

import pytest

from lighthouse_protocol.rules.stall import span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 ms"),
        (0.0004, "0 ms"),
        (0.0394, "39 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2.0 h"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text
