"""One source and two targets in this process, without managers: the targets share the state out between them."""

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from agent_client.healing.healing import Healing
from agent_client.state.codec import encode
from agent_client.step.rules.machine import StepMachine
from agent_client.transfer.connection import StateUnavailable
from agent_client.transfer.offers import Arriving
from tests.agent_client.assignments import assignment
from tests.agent_client.healing.test_healing_from_several import make_state
from tests.agent_client.transfer.sources import bytes_sent
from tests.processes import LOCALHOST

TIMEOUT_S = 20.0
ASSIGNMENT = assignment(groups=3, max_world_size=1, contributors=3, healing=(1, 2), secret="of the quorum")
NAMES = "abc"


class Groups:
    """a is at step 5, b and c are behind."""

    def __init__(self, stack: ExitStack) -> None:
        self.states = {name: make_state(seed, seed) for seed, name in enumerate(NAMES)}
        self.ranks = {
            name: stack.enter_context(closing(Healing(state, 0, LOCALHOST, TIMEOUT_S)))
            for name, state in self.states.items()
        }
        self.machines = {name: StepMachine() for name in NAMES}
        self.machines["a"] = StepMachine(step=5, tag_quorum_id=3, batches_committed=10)
        for name in "bc":
            target: Any = self.ranks[name]._target
            target._ask = lambda assignment, manager: self.ranks[manager].address
        self.pool = stack.enter_context(ThreadPoolExecutor(2))

    def told(self, name: str) -> Any:
        if name == "a":
            return replace(ASSIGNMENT, serve_to=(1, 2))
        heals = {"heal_from_rank": 0, "heal_from_address": "a", "max_rank": None}
        sharing = tuple("" if other == name else other for other in "bc")
        return replace(ASSIGNMENT, replica_rank=NAMES.index(name), shares_with=sharing, **heals)

    def serve(self) -> None:
        for name in NAMES:
            self.ranks[name].serve(self.told(name), self.machines[name])

    def heal(self) -> None:
        running = [self.pool.submit(self._heal, name) for name in "bc"]
        for it in running:
            it.result(60)

    def _heal(self, name: str) -> None:
        self.ranks[name].fetch(self.told(name))
        self.ranks[name].install(self.machines[name])

    def bits(self, name: str) -> bytes:
        return b"".join(encode(self.states[name].state_dict()))


@pytest.fixture
def groups(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr("agent_client.transfer.rules.stripes.SLOW_S", 60.0)  # on however slow a machine
    return Groups(stack)


def test_each_has_the_state_of_the_source_which_sent_it_once(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bytes_sent(monkeypatch)
    groups.serve()
    groups.heal()
    assert groups.bits("b") == groups.bits("c") == groups.bits("a")
    assert groups.machines["b"].tag == groups.machines["a"].tag
    assert sum(sent) < 1.01 * len(groups.bits("a"))


@pytest.mark.parametrize("ends", ["release", "the next step", "the next state that it offers"])
def test_what_was_received_is_handed_on_until_the_step_ends(groups: Groups, ends: str) -> None:
    offered: list[weakref.ref[Arriving]] = []
    server: Any = groups.ranks["b"]._source._server
    hand_on = server.hand_on
    server.hand_on = lambda key, state, secret: (offered.append(weakref.ref(state)), hand_on(key, state, secret))
    groups.serve()
    groups.heal()
    gc.collect()
    assert [it() is not None for it in offered] == [True]
    if ends == "release":
        groups.ranks["b"].release(is_committed=True)
    else:
        as_before = replace(groups.told("a"), quorum_id=9, serve_to=(2,) if ends != "the next step" else ())
        healing = (2,) if ends != "the next step" else ()
        groups.ranks["b"].serve(replace(as_before, replica_rank=1, healing=healing), groups.machines["b"])
        groups.ranks["b"].release(is_committed=False)
    gc.collect()
    assert [it() for it in offered] == [None]


def test_one_that_heals_in_another_quorum_does_not_keep_the_other_waiting(groups: Groups) -> None:
    """Its transfer was revoked: what it has not got it never hands on."""
    groups.serve()
    groups.ranks["c"].revoke(None, "the test revokes it")
    with pytest.raises(StateUnavailable):
        groups.ranks["c"].fetch(groups.told("c"))
    groups._heal("b")
    assert groups.bits("b") == groups.bits("a")


def test_without_room_for_what_was_received_each_reads_all(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_client.healing.source.available_bytes", lambda: 50 * 2**20)
    groups.serve()
    assert not groups.ranks["b"]._source.hands_on
    groups.heal()
    assert groups.bits("b") == groups.bits("c") == groups.bits("a")


@pytest.mark.parametrize("max_step", [0, 5])
def test_before_the_first_step_weights_that_all_have_loaded_are_not_read(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, max_step: int
) -> None:
    caplog.set_level(logging.INFO)
    states = [make_state(1, mean) for mean in (0, 1)]
    source, target = (stack.enter_context(closing(Healing(state, 0, LOCALHOST, TIMEOUT_S))) for state in states)
    target._target._ask = lambda assignment, manager: source.address  # type: ignore[method-assign]
    told = replace(ASSIGNMENT, max_step=max_step, tag_quorum_id=None)
    source.serve(replace(told, serve_to=(1,)), StepMachine(step=max_step))
    target.fetch(replace(told, replica_rank=1, max_rank=None, heal_from_rank=0, heal_from_address="a"))
    target.install(StepMachine())
    assert encode(states[1].state_dict()).layout == encode(states[0].state_dict()).layout
    bits = [b"".join(encode(state.state_dict())) for state in states]
    assert bits[0] == bits[1]
    assert ("this rank itself" in caplog.text) == (max_step == 0)
