"""How many Python functions one message runs in the manager's machine: a group of two ranks, in its second step."""

import sys
from types import FrameType

import pytest

from manager.group import events
from tests.manager.builders import ask
from tests.manager.groups import echo, past, vote


@pytest.mark.parametrize(
    ("what", "event", "most"),
    [
        ("a vote that commits", vote(102, 1, 1), 55),
        ("a vote that commits, with the next grant", vote(102, 1, 1, wants=True), 90),
        ("an acknowledged heartbeat", echo(2), 17),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_costs_few_calls(what: str, event: events.Event, most: int):
    machine, calls = past(), 0
    for rank in range(2):
        machine.handle(ask(90 + rank, rank, 1, tag_quorum_id=1), 0.2)
    machine.handle(vote(101, 0, 1, wants=True), 0.3)

    def count(frame: FrameType, kind: str, arg: object) -> None:
        nonlocal calls
        calls += kind == "call"

    sys.setprofile(count)
    try:
        machine.handle(event, 0.3)
    finally:
        sys.setprofile(None)
    assert calls <= most, what
