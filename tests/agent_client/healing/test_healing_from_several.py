"""One target and three sources in this process, without managers: each source is a group of its own."""

import logging
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_client.healing.healing import Healing
from agent_client.state.codec import encode
from agent_client.state.train_state import TrainState
from agent_client.step.rules.machine import StepMachine
from tests.agent_client.assignments import assignment
from tests.agent_client.healing.sources import bytes_sent, took
from tests.processes import LOCALHOST

SOURCES = "abc"
TIMEOUT_S = 20.0
ASSIGNMENT = assignment(groups=4, max_world_size=3, contributors=4, healing=(3,), secret="of the quorum")
TARGETS = replace(
    ASSIGNMENT,
    replica_rank=3,
    max_rank=None,
    heal_from_rank=0,
    heal_from_address="a",
    other_sources=("b", "c"),
)


class Model(torch.nn.Module):
    """48 MiB with its momentum, and buffers that are each group's own."""

    def __init__(self, seed: int, mean: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(1024)
        self.norm.running_mean.fill_(mean)  # type: ignore[union-attr]


def make_state(seed: int, mean: float) -> TrainState:
    model = Model(seed, mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainState(model, optimizer)
    state.begin_step()
    return state


class Groups:
    """`states`: by name; d's is another one."""

    def __init__(self, stack: ExitStack) -> None:
        self.states = {name: make_state(1 if name in SOURCES else 2, mean) for mean, name in enumerate("abcd")}
        self.ranks = {
            name: stack.enter_context(closing(Healing(state, 0, LOCALHOST, TIMEOUT_S)))
            for name, state in self.states.items()
        }
        target: Any = self.ranks["d"]
        target._find_address = lambda assignment, manager: self.ranks[manager].address

    def serve(self, name: str) -> None:
        told = replace(ASSIGNMENT, replica_rank="abcd".index(name), serve_to=(3,) if name == "a" else ())
        self.ranks[name].serve(told, StepMachine(step=5, tag_quorum_id=3, batches_committed=10))

    def heal(self) -> StepMachine:
        self.ranks["d"].fetch(TARGETS)
        machine = StepMachine()
        self.ranks["d"].install(machine)
        return machine

    def bits(self, name: str) -> bytes:
        return b"".join(encode(self.states[name].state_dict()))


@pytest.fixture
def groups(stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr("agent_client.healing.rules.stripes.SLOW_S", 60.0)  # on however slow a machine
    caplog.set_level(logging.INFO)
    return Groups(stack)


def givers(caplog: pytest.LogCaptureFixture) -> int:
    [line] = [record.getMessage() for record in caplog.records if " came from " in record.getMessage()]
    return line.count("MiB")


def test_it_is_that_of_the_assigned_one_bit_by_bit(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    for name in SOURCES:
        groups.serve(name)
    machine = groups.heal()
    assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (5, 3, 10)
    assert groups.bits("d") == groups.bits("a") != groups.bits("b")
    assert givers(caplog) == 3


def test_no_source_waits_for_it_afterwards(groups: Groups) -> None:
    for name in SOURCES:
        groups.serve(name)
    groups.heal()
    with took(0, TIMEOUT_S / 4):
        for name in SOURCES:
            groups.ranks[name].release(is_committed=True)


def test_one_whose_quorum_is_revoked_is_replaced(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    for name in SOURCES:
        groups.serve(name)
    groups.ranks["b"].close()
    groups.heal()
    assert groups.bits("d") == groups.bits("a")
    assert givers(caplog) == 2


def test_without_the_assigned_one_it_is_that_of_the_next(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    for name in "bc":
        groups.serve(name)
    groups.ranks["a"].close()
    groups.heal()
    assert groups.bits("d") == groups.bits("b")
    assert givers(caplog) == 2


TOLD = assignment(groups=3, max_world_size=1, contributors=3, healing=(1, 2), secret="of the quorum")


@pytest.mark.parametrize(("max_step", "mean", "is_read"), [(0, 0, False), (0, 1, True), (5, 0, True)])
def test_before_the_first_step_a_state_that_all_have_loaded_is_not_read(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, max_step: int, mean: int, is_read: bool
) -> None:
    states, sent = [make_state(1, 0), make_state(1, mean)], bytes_sent(monkeypatch)
    source, target = (stack.enter_context(closing(Healing(state, 0, LOCALHOST, TIMEOUT_S))) for state in states)
    target._find_address = lambda assignment, manager: source.address  # type: ignore[method-assign]
    told = replace(TOLD, max_step=max_step, tag_quorum_id=None)
    source.serve(replace(told, serve_to=(1,)), StepMachine(step=max_step))
    target.fetch(replace(told, replica_rank=1, max_rank=None, heal_from_rank=0, heal_from_address="a"))
    target.install(StepMachine())
    assert bool(sent) == is_read
    bits = [b"".join(encode(state.state_dict())) for state in states]
    assert bits[0] == bits[1]
