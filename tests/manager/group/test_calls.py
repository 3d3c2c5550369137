"""How many Python functions one message runs in the manager's machine: a group of two ranks, in its second step."""

from collections.abc import Sequence

import pytest

from lighthouse_protocol.messages.session import Heartbeat
from manager.group import events
from manager.group.machine import GroupMachine
from tests.calls import calls_of
from tests.manager.builders import ask
from tests.manager.groups import echo, past, vote


def in_second_step() -> GroupMachine:
    machine = past()
    for rank in range(2):
        machine.handle(ask(90 + rank, rank, 1, tag_quorum_id=1), 0.2)
    machine.handle(vote(101, 0, 1, wants=True), 0.3)
    return machine


@pytest.mark.parametrize(
    ("what", "event", "most"),
    [
        ("a vote that commits", vote(102, 1, 1), 55),
        ("a vote that commits, with the next grant", vote(102, 1, 1, wants=True), 85),
        ("an acknowledged heartbeat", echo(2), 17),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_costs_few_calls(what: str, event: events.Event, most: int):
    machine = in_second_step()
    assert calls_of(lambda: machine.handle(event, 0.3)) <= most, what


def test_a_heartbeat_without_news_costs_few_calls():
    machine, effects = in_second_step(), list[Sequence[events.Effect]]()
    machine.handle(echo(machine.session._heartbeats), 1.0)
    assert calls_of(lambda: effects.append(machine.tick(1.9))) <= 17
    [[sent]] = effects
    assert isinstance(sent, events.Sent)
    assert isinstance(sent.message, Heartbeat)
