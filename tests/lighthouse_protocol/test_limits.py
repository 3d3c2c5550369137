"""What others have written, as a reason: one line. That each reader gives such a one is in wire/test_messages.py."""

import grpc
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_REASON_CHARS, cut_reason
from lighthouse_protocol.wire.codec import error_of

FORGED = "out of memory\n2026-01-01T00:00:00Z E lighthouse: all is lost\r\x1b[2J\x85\u2028."


@given(st.text(max_size=50) | st.text("\n\x1b a", min_size=MAX_REASON_CHARS - 5, max_size=MAX_REASON_CHARS + 5))
def test_a_reason_is_one_printable_line_and_stays_as_it_is(text: str) -> None:
    reason = cut_reason(text)
    assert reason.isprintable()
    assert len(reason) <= MAX_REASON_CHARS
    assert cut_reason(reason) == reason


def test_what_cannot_be_printed_is_escaped() -> None:
    assert cut_reason("  a\n\n b\x1b[2J \N{SNOWMAN} \udc80 ") == r"a b\x1b[2J ☃ \udc80"


def test_no_status_is_an_error_of_two_lines() -> None:
    for status in grpc.StatusCode:
        if status is not grpc.StatusCode.OK:
            assert str(error_of(status, FORGED)).isprintable()
