"""A source whose state cannot be used: the reason is told, and nothing of it is taken over. That another is asked:
test_fetch.py, test_healing.py."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_client.healing.connection import StateRefused, StateUnavailable
from agent_client.state.codec import encode
from agent_client.state.snapshot import DoesNotFit, StateMismatch
from agent_client.state.tree import CorruptState
from agent_client.step.rules.machine import StepMachine
from tests.agent_client.healing.pair import TARGETS, Pair
from tests.agent_client.healing.sources import answering, ok, sends

Answer = Callable[[dict[str, Any]], tuple[bytes, bytes]]
"""What a source sends that holds this state: first its head and checksums, then its pieces."""


def whole(state: dict[str, Any]) -> tuple[bytes, bytes]:
    encoding = encode(state)
    return encoding.head + b"".join(encoding.checksums()), b"".join(encoding.stripe(0, encoding.body_length))


def with_another(*path: str, value: object) -> Answer:
    """Whole answers, with the checksums that they should have."""

    def answer(state: dict[str, Any]) -> tuple[bytes, bytes]:
        *folders, name = path
        inner = state
        for folder in folders:
            inner = inner[folder]
        inner[name] = value
        manifest, body = whole(state)
        return ok(len(manifest), manifest), ok(len(body), body)

    return answer


def damaged(state: dict[str, Any]) -> tuple[bytes, bytes]:
    manifest, body = whole(state)
    return ok(len(manifest), manifest), ok(len(body), body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])


WEIGHT = ("train", "model", "weight")
OTHER_SHAPE = with_another(*WEIGHT, value=torch.zeros(3, 3)), r"\['weight'\]: shape \(1024, 1024\) here, \(3, 3\) rec"
OTHER_DTYPE = with_another(*WEIGHT, value=torch.zeros(1024, 1024).double()), r"\['weight'\]: torch.float32 here, torch"
NO_AGENTS = "it was not sent by an Agent, or a later quorum has committed it"

UNUSABLE: dict[str, tuple[Answer, str]] = {
    "another shape": OTHER_SHAPE,
    "a later step": (with_another("agent", "step", value=6), "it is of step 6, not 5"),
    "an earlier step": (with_another("agent", "step", value=4), "it is of step 4, not 5"),
    "a later quorum": (with_another("agent", "tag_quorum_id", value=TARGETS.quorum_id + 1), NO_AGENTS),
    "no tag": (with_another("agent", "tag_quorum_id", value=None), NO_AGENTS),
    "no number": (with_another("agent", "batches_committed", value="many"), NO_AGENTS),
    "wrong byte": (damaged, "the checksum of piece"),
}


class BadPair(Pair):
    """The source sends what cannot be used."""

    def __init__(self, stack: ExitStack, answer: Answer) -> None:
        super().__init__(stack)
        self.states[0].begin_step()
        agent = {"step": 5, "tag_quorum_id": 3, "batches_committed": 10}
        parts = answer({"train": self.states[0].snapshot(), "agent": agent})
        address = stack.enter_context(answering(*map(sends, parts)))
        self.target._find_address = lambda assignment, manager: address  # type: ignore[method-assign]

    def install(self) -> StepMachine:
        machine = StepMachine()
        self.target.install(machine)
        return machine

    def target_bits(self) -> bytes:
        return b"".join(encode(self.states[1].state_dict()))


@pytest.mark.parametrize(("answer", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_it_is_refused_with_the_reason_and_nothing_is_touched(stack: ExitStack, answer: Answer, words: str) -> None:
    pair = BadPair(stack, answer)
    before = pair.target_bits()
    kind = CorruptState if answer is damaged else StateMismatch
    with pytest.raises(kind, match=f"(?s)the state of .*from a .*{words}"):
        pair.fetch()
    assert pair.install() == StepMachine()
    assert pair.target_bits() == before


@pytest.mark.parametrize(("other", "difference"), [OTHER_SHAPE, OTHER_DTYPE], ids=["shape", "dtype"])
def test_a_state_of_another_model_is_refused_by_its_header(stack: ExitStack, other: Answer, difference: str) -> None:
    """Its tensors never come: a group that is none of its peers' must not wait for all of a large state."""
    pair = BadPair(stack, lambda state: (other(state)[0], b"its pieces are not asked for"))
    with pytest.raises(DoesNotFit, match=difference) as caught:
        pair.fetch()
    assert re.match(rf"state\['model'\]{difference}", caught.value.difference)


def test_a_state_that_does_not_fit_into_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.serve()
    monkeypatch.setattr("agent_client.healing.healing.available_bytes", lambda: 2**20)
    with pytest.raises(CorruptState, match=r"\d+ bytes, more than 1048576"):
        pair.fetch()


def test_a_state_that_cannot_be_sent_is_refused_with_its_reason(pair: Pair) -> None:
    """The source goes on with its step, and the target hears at once what no other attempt would change."""
    pair.states[0].optimizer.param_groups[0]["seen"] = {1}
    pair.serve(secret="of the quorum")
    with pytest.raises(StateRefused, match=r"state\['train'\]\['optimizer'\].*\['seen'\] is a set"):
        pair.fetch(replace(TARGETS, secret="of the quorum"))
    with pytest.raises(StateUnavailable, match="it answered 403") as caught:
        pair.fetch(replace(TARGETS, secret="of a stranger"))
    assert not isinstance(caught.value, StateRefused)
