"""A transfer beside the steps: a copy that outlives its step, and a target that nobody waits for."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_client.healing.connection import StateUnavailable
from agent_client.healing.healing import BackgroundFetch
from agent_client.state.codec import Encoding
from agent_client.state.snapshot import StateMismatch
from tests.agent_client.healing.pair import ASSIGNMENT, TARGETS, Pair
from tests.processes import eventually

BESIDE = replace(ASSIGNMENT, serve_to=(1,), catching_up=(1,), healing=(), tag_quorum_id=3)
CATCHES_UP = replace(TARGETS, catching_up=(1,), healing=(), tag_quorum_id=3)
LATER = replace(BESIDE, max_step=6, serve_to=())


def serve(pair: Pair, **changes: Any) -> None:
    pair.states[0].begin_step()
    pair.source.serve(replace(BESIDE, **changes), pair.machine)


def fetch(pair: Pair) -> BackgroundFetch:
    pair.states[1].begin_step()
    return pair.target.fetch_in_background(CATCHES_UP)


def kept(pair: Pair) -> int:
    return len(pair.source._server._kept)


def test_the_copy_is_that_of_its_step_whatever_comes_after(pair: Pair) -> None:
    serve(pair)
    before = pair.weights()[0].clone()
    pair.source.release(is_committed=True)
    pair.weights()[0].zero_()
    pair.source.serve(LATER, pair.machine)
    received = fetch(pair).received.result()
    assert torch.equal(received["train"]["model"]["weight"], before)
    assert received["agent"]["step"] == 5


def test_it_is_there_beside_what_a_later_step_offers(pair: Pair) -> None:
    serve(pair)
    pair.source.release(is_committed=True)
    pair.machine.step = 6
    three = replace(LATER, replica_world_size=3, replica_ids=("a", "b", "c"))
    plain = replace(three, serve_to=(2,), healing=(2,), contributors=1)
    pair.source.serve(plain, pair.machine)
    assert fetch(pair).received.result()["agent"]["step"] == 5
    pair.target.fetch(replace(TARGETS, max_step=6, tag_quorum_id=3))


def test_it_is_forgotten_when_all_its_targets_have_read_it(pair: Pair) -> None:
    serve(pair, replica_world_size=3, replica_ids=("a", "b", "c"), serve_to=(1, 2), catching_up=(1, 2))
    fetch(pair).received.result()
    fetch(pair).received.result()
    eventually(lambda: kept(pair) == 0, "it is forgotten")


def test_it_is_forgotten_when_its_target_catches_up_no_more(pair: Pair) -> None:
    serve(pair)
    pair.source.serve(replace(LATER, quorum_id=8), pair.machine)
    assert kept(pair) == 1, "another quorum, the same target"
    pair.source.serve(replace(LATER, quorum_id=9, catching_up=()), pair.machine)
    assert kept(pair) == 0


def test_it_is_forgotten_after_its_time(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(stack, timeout_s=50.0)
    serve(pair)
    now = time.monotonic()
    for later_s, count in ((49, 1), (51, 0)):
        monkeypatch.setattr("agent_client.healing.healing.time.monotonic", lambda later_s=later_s: now + later_s)
        pair.source.serve(LATER, pair.machine)
        assert kept(pair) == count


def test_a_newer_copy_for_the_same_target_takes_its_place(pair: Pair) -> None:
    serve(pair)
    serve(pair, quorum_id=8)
    assert [key.quorum_id for key in pair.source._server._kept] == [8]


def test_a_revoke_ends_it_on_neither_side(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(pair)

    def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
        for number, chunk in enumerate(real(encoding, start, stop)):
            if number == 1:
                pair.source.revoke(7, "a test says so")
                pair.target.revoke(7, "a test says so")
            yield chunk

    monkeypatch.setattr(Encoding, "stripe", stripe)
    assert fetch(pair).received.result()["agent"]["step"] == 5


def test_who_follows_no_more_can_end_it(pair: Pair) -> None:
    beside = fetch(pair)  # nobody serves yet
    beside.cancel("a test says so")
    with pytest.raises(StateUnavailable, match="canceled: a test says so"):
        beside.received.result()


def test_without_room_the_source_refuses_at_once(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(stack, timeout_s=100.0)
    monkeypatch.setattr("agent_client.healing.healing.has_room", lambda size: False)
    beside = fetch(pair)  # it waits for the copy
    assert not beside.received.done()
    serve(pair)
    with pytest.raises(StateUnavailable, match="409"):
        beside.received.result(timeout=30)


def test_a_state_of_another_lineage_is_refused(pair: Pair) -> None:
    pair.machine.tag_quorum_id = 2
    serve(pair)
    with pytest.raises(StateMismatch, match="quorum 2 has committed it, not 3"):
        fetch(pair).received.result()


def test_one_that_catches_up_offers_nothing(pair: Pair) -> None:
    pair.states[0].begin_step()
    pair.source.serve(replace(LATER, replica_rank=1, contributors=0, max_step=5), pair.machine)
    assert (kept(pair), pair.source._server._held) == (0, None)
