"""Healing between real processes: bad sources, a death in the middle; what a source waits for."""

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_client.healing.connection import StateUnavailable
from agent_client.healing.healing import Healing
from agent_client.state.codec import Encoding
from agent_client.step.rules.machine import StepMachine
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.messages.progress import HealProgress
from tests.agent_client.healing.pair import ASSIGNMENT, Pair
from tests.agent_client.matrix_events import Cell, begin_transfer, check_state_came_from, finish
from tests.agent_client.training_jobs import MakeJob
from tests.agent_client.training_kinds import Ddp
from tests.processes import eventually


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is asked to wait for its state a moment only."""
    monkeypatch.setattr("agent_client.healing.fetch.WAIT_SHARE", 0.01)


class TestServing:
    def test_the_target_takes_it_over(self, pair: Pair) -> None:
        pair.serve()
        pair.fetch()
        machine = StepMachine()
        pair.target.install(machine)
        assert torch.equal(*pair.weights())
        assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (5, 3, 10)

    def test_what_was_received_is_told_with_its_size_and_time(self, pair: Pair) -> None:
        pair.serve()
        pair.fetch(ASSIGNMENT)  # nothing to take over
        assert pair.activity.healed is None
        pair.fetch()
        healed = pair.activity.healed
        assert healed is not None
        assert (healed.heals, 0 < healed.seconds < 10) == (1, True)
        assert healed.bytes == 4 * (1024 * 1024 + 1024)  # of a Linear's weight and bias

    @pytest.mark.usefixtures("impatient")
    def test_a_state_that_does_not_come_is_not_told(self, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO), pytest.raises(StateUnavailable):
            pair.fetch()
        assert pair.activity.healed is None
        assert pair.activity.take_sample().sample.heal is None
        assert [line for line in caplog.messages if "heal" in line] == [
            "healing from a at step 5",
            "the heal from a at step 5 broke off after 0 B",
        ]

    def test_its_bytes_are_marked_as_they_arrive(self, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[HealProgress] = []
        check, own = pair.target._check_received, pair.activity

        def checked(assignment: Assignment, received: object) -> None:
            heal = own.take_sample().sample.heal
            assert heal is not None
            seen.append(heal)
            check(assignment, received)

        pair.target._check_received = checked  # type: ignore[method-assign]
        with caplog.at_level(logging.INFO):
            pair.serve()
            pair.fetch()
        [last], over = seen, own.take_sample().sample.heal
        assert over is not None
        assert last.received == last.total == over.received > 4 * (1024 * 1024 + 1024)
        assert (last.source, last.step, last.is_over, over.is_over) == ("a", 5, False, True)
        assert [re.sub(r"in .*", "", line) for line in caplog.messages if "heal" in line] == [
            "healing from a at step 5",
            "healed from a at step 5: 4.0 MiB ",
        ]

    def test_a_state_that_moves_is_served_as_it_was(self, pair: Pair) -> None:
        pair.states[0].stands_still = False
        pair.serve()
        before = pair.weights()[0].clone()
        pair.source.release(is_committed=True)
        pair.weights()[0].zero_()
        pair.fetch()
        pair.target.install(StepMachine())
        assert torch.equal(pair.weights()[1], before)

    @pytest.mark.usefixtures("impatient")
    def test_what_is_held_is_not_offered_once_it_may_be_written(self, pair: Pair) -> None:
        pair.serve()
        pair.source.release(is_committed=True)
        with pytest.raises(StateUnavailable, match="from a is not available: it answered 409"):
            pair.fetch()

    def test_whoever_is_up_to_date_stands_in(self, pair: Pair) -> None:
        pair.states[0].begin_step()
        pair.source.serve(ASSIGNMENT, pair.machine)  # another one was dealt the target
        pair.fetch()

    @pytest.mark.usefixtures("impatient")
    def test_but_for_a_state_that_moves(self, pair: Pair) -> None:
        pair.states[0].stands_still = False
        pair.states[0].begin_step()
        pair.source.serve(ASSIGNMENT, pair.machine)
        with pytest.raises(StateUnavailable):
            pair.fetch()

    @pytest.mark.usefixtures("impatient")
    def test_where_nobody_heals_nothing_is_offered(self, pair: Pair) -> None:
        pair.serve()
        pair.source.serve(replace(ASSIGNMENT, contributors=2, healing=()), pair.machine)
        with pytest.raises(StateUnavailable):
            pair.fetch()


def slow_stripe(pause_s: float) -> Any:
    def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[memoryview]:
        for chunk in real(encoding, start, stop):
            yield chunk[: len(chunk) // 2]
            time.sleep(pause_s)
            yield chunk[len(chunk) // 2 :]

    return stripe


def has_received(target: Healing) -> bool:
    """Some bytes of tensors have arrived, so the source sends the body and not its manifest."""
    fetch = target._fetch
    return fetch is not None and fetch._transfer is not None and fetch._transfer._reported > 0


class TestHolding:
    """The source's write, against a transfer that takes its time."""

    @pytest.fixture
    def transfer(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pair, Any]]:
        monkeypatch.setattr(Encoding, "stripe", slow_stripe(0.1))
        pair = Pair(stack)
        pair.serve()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(pair.fetch)
            eventually(lambda: has_received(pair.target), "it is read")
            yield pair, running

    def test_a_commit_waits_for_the_reader(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        before = pair.weights()[0].clone()
        pair.source.release(is_committed=True)
        pair.weights()[0].zero_()
        running.result(60)
        pair.target.install(StepMachine())
        assert torch.equal(pair.weights()[1], before)

    def test_a_discard_does_not(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        began_at = time.monotonic()
        pair.source.release(is_committed=False)
        assert time.monotonic() - began_at < 20
        with pytest.raises(StateUnavailable):
            running.result(60)

    @pytest.mark.parametrize("quorum_id", [7, None], ids=["its quorum", "all"])
    def test_a_revoke_ends_the_transfer_on_both_sides(self, transfer: tuple[Pair, Any], quorum_id: int | None) -> None:
        pair, running = transfer
        for side in (pair.source, pair.target):
            side.revoke(quorum_id, "c is lost")
        pair.source.release(is_committed=True)
        with pytest.raises(StateUnavailable, match="canceled: c is lost"):
            running.result(60)

    def test_an_older_revoke_does_nothing(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        for side in (pair.source, pair.target):
            side.revoke(6, "that is over")
        running.result(60)

    def test_after_a_revoke_no_transfer_begins(self, pair: Pair) -> None:
        pair.serve()
        pair.target.revoke(7, "c is lost")
        with pytest.raises(StateUnavailable, match="quorum 7 was revoked"):
            pair.fetch()


# -- replica groups under real daemons

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")


def test_another_source_is_asked_in_the_same_step(make_job: MakeJob) -> None:
    """c heals in its first step from a, which says a wrong address, or from b; and nobody loses one."""
    cell = Cell("ddp", make_job(Ddp, ballast=True))
    groups = cell.train("a", "b")
    groups[0].ranks[0].call("advertise_nowhere")
    late = cell.job.group("c")
    cell.add(late)
    cell.wait_together(*groups, late)
    finish(cell, [*groups, late])
    assert cell.discards(*groups, late) == 0
    log = cell.job.log_of(late)
    assert "healing from a" in log
    assert re.search("cannot receive the state of .* from [ab], which .*refused", log)


def test_a_source_that_stops_while_it_sends(make_job: MakeJob) -> None:
    """The step is lost with it; the transfer ends with the quorum, long before it would by itself. One that is killed:
    test_matrix.py."""
    cell = Cell("ddp", make_job(Ddp, ballast=True))
    groups = cell.train("a", "b")
    target = cell.job.group("c")
    source = begin_transfer(cell, target, *groups)
    [other] = (group for group in groups if group is not source)
    source.ranks[0].stop()
    source.manager.kill()
    began_at = time.monotonic()
    other.ranks[0].call("allow_sending")
    cell.wait_together(other, target)
    assert time.monotonic() - began_at < 30
    check_state_came_from(other, cell, target)
    source.kill()
    finish(cell, [other, target])
