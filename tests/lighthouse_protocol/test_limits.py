"""What others have written, as a reason: one line, whichever reader gives it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_REASON_CHARS, cut_reason
from lighthouse_protocol.wire import generation_wire, node_wire, session_wire, supervisor_wire, watch_wire
from lighthouse_protocol.wire.status_codes import error_of
from tests.lighthouse_protocol.wire import test_generation_wire, test_node_wire, test_session_wire, test_supervisor_wire

REASONS = {"reason", "lost", "text", "cause", "why", "who", "excluded", "down"}
FORGED = "out of memory\n2026-01-01T00:00:00Z E lighthouse: all is lost\r\x1b[2J\x85\u2028."

Wire = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]
WIRES: list[Wire] = [
    (test_session_wire.to_lighthouse, session_wire.session_request_to_wire, session_wire.session_request_from_wire),
    (
        test_session_wire.to_manager,
        lambda message: session_wire.session_response_to_wire(message, created_at=1.0),
        session_wire.session_response_from_wire,
    ),
    (test_session_wire.to_rank, watch_wire.watch_response_to_wire, watch_wire.watch_response_from_wire),
    (test_node_wire.REQUESTS, node_wire.node_request_to_wire, node_wire.node_request_from_wire),
    (test_node_wire.RESPONSES, node_wire.node_response_to_wire, node_wire.node_response_from_wire),
    (
        test_supervisor_wire.requests,
        supervisor_wire.supervisor_request_to_wire,
        supervisor_wire.supervisor_request_from_wire,
    ),
    (
        test_supervisor_wire.responses,
        supervisor_wire.supervisor_response_to_wire,
        supervisor_wire.supervisor_response_from_wire,
    ),
    (test_generation_wire.requests, generation_wire.rank_request_to_wire, generation_wire.rank_request_from_wire),
    (test_generation_wire.responses, generation_wire.rank_response_to_wire, generation_wire.rank_response_from_wire),
]
unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=15)


@given(st.text(max_size=50) | st.text("\n\x1b a", min_size=MAX_REASON_CHARS - 5, max_size=MAX_REASON_CHARS + 5))
def test_a_reason_is_one_printable_line_and_stays_as_it_is(text: str) -> None:
    reason = cut_reason(text)
    assert reason.isprintable()
    assert len(reason) <= MAX_REASON_CHARS
    assert cut_reason(reason) == reason


def test_what_cannot_be_printed_is_escaped() -> None:
    assert cut_reason("  a\n\n b\x1b[2J \N{SNOWMAN} \udc80 ") == r"a b\x1b[2J ☃ \udc80"


@pytest.mark.parametrize("wire", WIRES)
@unhurried
@given(st.data())
def test_no_reader_gives_a_reason_of_two_lines(wire: Wire, data: st.DataObject) -> None:
    """Also where it was not one of our writers that wrote it."""
    messages, to_wire, from_wire = wire
    message = to_wire(data.draw(messages))
    forge(message)
    for reason in reasons_in(from_wire(message)):
        assert reason.isprintable()


def test_nor_does_a_status() -> None:
    for status in grpc.StatusCode:
        if status is not grpc.StatusCode.OK:
            assert str(error_of(status, FORGED)).isprintable()


def forge(message: Any) -> None:
    """All reasons in it."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE and not isinstance(value, dict):
            for part in value if field.is_repeated else [value]:
                forge(part)
    for field in message.DESCRIPTOR.fields:
        if field.name in REASONS and field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, FORGED)


def reasons_in(value: Any) -> Iterator[str]:
    if isinstance(value, Exception):
        yield str(value)
    elif isinstance(value, tuple):
        for part in value:
            yield from reasons_in(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if field.name in REASONS and isinstance(part, str):
                yield part
            else:
                yield from reasons_in(part)
