"""What a rank's log says of its quorums."""

import logging

import pytest

from agent_client.step.quorum_request import log_quorum
from lighthouse_protocol.messages.membership import Assignment
from manager.group.requests import assign
from tests.manager.builders import member, quorum


def assigned(quorum_id: int, *names: str, step: int = 3) -> Assignment:
    found = assign(quorum(*(member(name, step) for name in names), quorum_id=quorum_id), "a", 0, True)
    assert found is not None
    return found


def test_who_was_admitted_and_who_is_gone(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    quorums = [
        assigned(1, "a", "b"),
        assigned(1, "a", "b", step=4),
        assigned(2, "a", "c", "d"),
        assigned(5, "a", "c", "d"),
    ]
    for before, now in zip([None, *quorums], quorums, strict=False):
        log_quorum(before, now)
    assert caplog.messages == [
        "quorum 1: 2 groups from step 3",
        "quorum 2: 3 groups from step 3; joined: c, d; without: b",
        "quorum 5: 3 groups from step 3",
    ]


def test_of_many_the_first_are_named(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    log_quorum(assigned(1, "a"), assigned(2, "a", *(f"g{number:02}" for number in range(20))))
    assert caplog.messages[0].endswith("g15 and 4 more")
