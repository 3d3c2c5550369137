"""A source whose state cannot be used: the reason is told, nothing of it is taken over, and another source is asked."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_client.agent.rules.step import StepMachine
from agent_client.healing.target import DoesNotFit
from agent_client.state.decoding import CorruptState, encode
from agent_client.state.snapshot import StateMismatch
from tests.agent_client.healing.test_healing import TARGETS, Pair
from tests.agent_client.transfer.sources import answering, ok

State = dict[str, Any]
Answer = Callable[[State], bytes]
"""What a source sends that holds this state."""


def changed(change: Callable[[State], object]) -> Answer:
    """A whole answer, with the checksums that it should have."""

    def answer(state: State) -> bytes:
        change(state)
        content = b"".join(encode(state))
        return ok(len(content), content)

    return answer


def damaged(damage: Callable[[bytes], bytes]) -> Answer:
    return lambda state: damage(b"".join(encode(state)))


def lack_a_key(state: State) -> None:
    del state["train"]["model"]["weight"]


def have_another_key(state: State) -> None:
    state["train"]["model"]["bias2"] = torch.zeros(1)


def have_another_shape(state: State) -> None:
    state["train"]["model"]["weight"] = torch.zeros(3, 3)


def have_another_dtype(state: State) -> None:
    state["train"]["model"]["weight"] = state["train"]["model"]["weight"].double()


def be_of_the_future(state: State) -> None:
    state["agent"]["step"] += 1


def be_of_a_later_quorum(state: State) -> None:
    state["agent"]["tag_quorum_id"] = TARGETS.quorum_id + 1


MISFITS: dict[Callable[[State], None], str] = {
    lack_a_key: r"\['weight'\]: missing in what was received",
    have_another_key: r"\['bias2'\]: received, but unknown here",
    have_another_shape: r"\['weight'\]: shape \(1024, 1024\) here, \(3, 3\) received",
    have_another_dtype: r"\['weight'\]: torch.float32 here, torch.float64 received",
    be_of_the_future: "it is of step 6, not 5",
    be_of_a_later_quorum: "of another quorum's future",
}

BROKEN: dict[str, tuple[Callable[[bytes], bytes], type[Exception], str]] = {
    "oversized": (lambda good: ok(2**50, good), CorruptState, f"the answer has {2**50} bytes, more than"),
    "wrong byte": (lambda good: ok(len(good), good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]), CorruptState, "checksum"),
}

CASES: list[Any] = [
    *(pytest.param(changed(change), StateMismatch, words, id=change.__name__) for change, words in MISFITS.items()),
    *(pytest.param(damaged(damage), kind, words, id=name) for name, (damage, kind, words) in BROKEN.items()),
]


class BadPair(Pair):
    """The assigned source sends what cannot be used; where `has_another`, a good one is asked after it."""

    def __init__(self, stack: ExitStack, answer: Answer, *, has_another: bool) -> None:
        super().__init__(stack)
        self.serve()
        content = answer({"train": self.states[0].snapshot(), "agent": self.agent_state()})

        def send(connection: socket.socket) -> None:
            connection.sendall(content)

        bad = stack.enter_context(answering(send))
        addresses = {"a:1": bad, "c:1": self.source.address}
        self.asked: list[str] = []

        def ask(manager: str) -> str:
            self.asked.append(manager)
            return addresses[manager]

        self.target._target._ask = ask  # type: ignore[method-assign]
        self.assignment = replace(TARGETS, other_sources=("c:1",) if has_another else ())

    def agent_state(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "step": machine.step,
            "tag_quorum_id": machine.tag_quorum_id,
            "batches_committed": machine.batches_committed,
        }

    def fetch(self) -> None:
        self.states[1].begin_step()
        self.target.fetch(self.assignment)

    def install(self) -> StepMachine:
        machine = StepMachine()
        self.target.install(machine)
        return machine

    def target_bits(self) -> bytes:
        return b"".join(encode(self.states[1].state_dict()))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as it:
        yield it


@pytest.mark.parametrize(("answer", "kind", "words"), CASES)
def test_it_is_refused_with_the_reason_and_nothing_is_touched(
    stack: ExitStack, answer: Answer, kind: type[Exception], words: str
) -> None:
    pair = BadPair(stack, answer, has_another=False)
    before = pair.target_bits()
    with pytest.raises(kind, match=f"(?s)the state of .*from a .*{words}"):
        pair.fetch()
    assert pair.install() == StepMachine()
    assert pair.target_bits() == before


@pytest.mark.parametrize("answer", [pytest.param(case.values[0], id=case.id) for case in CASES])
def test_another_source_is_asked_and_its_state_is_taken_whole(
    stack: ExitStack, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    pair = BadPair(stack, answer, has_another=True)
    before = pair.target_bits()
    pair.fetch()
    assert [line.rpartition("; ")[2] for line in caplog.messages if "now from" in line] == ["now from the group at c:1"]
    assert (pair.asked[0], pair.asked[-1]) == ("a:1", "c:1")
    assert pair.target_bits() == before, "the script's thread installs it"
    assert pair.install().step == 5
    assert torch.equal(*pair.weights())


@pytest.mark.parametrize("change", [have_another_shape, have_another_dtype])
def test_a_state_of_another_model_is_refused_by_its_header(stack: ExitStack, change: Callable[[State], None]) -> None:
    """Its tensors never come: a group that is none of its peers' must not wait for all of a large state."""
    whole = changed(change)
    pair = BadPair(stack, lambda state: whole(state)[:10_000], has_another=False)
    with pytest.raises(DoesNotFit, match=MISFITS[change]) as caught:
        pair.fetch()
    assert re.fullmatch(rf"state\['model'\]{MISFITS[change]}", caught.value.difference)
