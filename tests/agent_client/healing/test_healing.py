"""Healing between real processes: bad sources, a death in the middle; what a source waits for."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_client.agent.rules.step import StepMachine
from agent_client.healing.healing import Healing
from agent_client.healing.rules.modes import StateServing
from agent_client.state.encoding import Encoding
from agent_client.transfer.response import StateUnavailable
from examples.ports import free_port
from tests.agent_client.healing.pair import ASSIGNMENT, Pair
from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Pending, Rank, RankServer, state_of
from tests.processes import LOCALHOST, Lighthouse, eventually

ACTOR = "tests.agent_client.healing_actor:HealingActor"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is asked to wait for its state a moment only."""
    monkeypatch.setattr("agent_client.transfer.fetch._WAIT_SHARE", 0.01)


class TestServing:
    @pytest.mark.parametrize("mode", list(StateServing))
    def test_in_every_mode_the_target_takes_it_over(self, stack: ExitStack, mode: StateServing) -> None:
        pair = Pair(stack, state_serving=mode)
        pair.serve()
        pair.fetch()
        machine = StepMachine()
        pair.target.install(machine)
        assert torch.equal(*pair.weights())
        assert (machine.step, machine.tag_quorum_id, machine.batches_committed) == (5, 3, 10)

    def test_a_snapshot_is_what_it_was_when_it_was_taken(self, stack: ExitStack) -> None:
        pair = Pair(stack, state_serving=StateServing.SNAPSHOT)
        pair.serve()
        before = pair.weights()[0].clone()
        pair.source.release(is_committed=True)
        pair.weights()[0].zero_()
        pair.fetch()
        pair.target.install(StepMachine())
        assert torch.equal(pair.weights()[1], before)

    @pytest.mark.usefixtures("impatient")
    def test_what_is_held_is_not_offered_once_it_may_be_written(self, stack: ExitStack) -> None:
        pair = Pair(stack, state_serving=StateServing.HOLD)
        pair.serve()
        pair.source.release(is_committed=True)
        with pytest.raises(StateUnavailable, match="from a is not there: it answered 409"):
            pair.fetch()

    @pytest.mark.parametrize(
        ("free_mib", "ranks_of_the_host", "is_read_in_place"),
        [(1024, "1", False), (20, "1", False), (20, "8", True), (4, "1", True)],
    )
    def test_auto_copies_where_there_is_room_for_all_ranks_of_the_host(
        self,
        stack: ExitStack,
        monkeypatch: pytest.MonkeyPatch,
        free_mib: int,
        ranks_of_the_host: str,
        is_read_in_place: bool,
    ) -> None:
        monkeypatch.setattr("agent_client.healing.source.available_bytes", lambda: free_mib * 2**20)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_the_host)
        pair = Pair(stack, state_serving=StateServing.AUTO)
        pair.serve()
        assert pair.source._source._is_read_in_place is is_read_in_place

    def test_a_state_that_moves_is_never_read_in_place(self, stack: ExitStack) -> None:
        pair = Pair(stack, state_serving=StateServing.HOLD)
        pair.states[0].stands_still = False
        pair.serve()
        assert not pair.source._source._is_read_in_place

    def test_whoever_is_up_to_date_stands_in(self, stack: ExitStack) -> None:
        pair = Pair(stack, state_serving=StateServing.SNAPSHOT)
        pair.states[0].begin_step()
        pair.source.serve(ASSIGNMENT, pair.machine)  # another one was dealt the target
        assert pair.source._source._is_read_in_place, "it costs no copy"
        pair.fetch()

    @pytest.mark.usefixtures("impatient")
    def test_but_for_a_state_that_moves(self, stack: ExitStack) -> None:
        pair = Pair(stack)
        pair.states[0].stands_still = False
        pair.states[0].begin_step()
        pair.source.serve(ASSIGNMENT, pair.machine)
        with pytest.raises(StateUnavailable):
            pair.fetch()

    @pytest.mark.usefixtures("impatient")
    def test_where_nobody_heals_nothing_is_offered(self, stack: ExitStack) -> None:
        pair = Pair(stack)
        pair.serve()
        pair.source.serve(replace(ASSIGNMENT, contributors=2, healing=()), pair.machine)
        with pytest.raises(StateUnavailable):
            pair.fetch()


def slow_chunks(pause_s: float) -> Any:
    def chunks(encoding: Encoding, start: int, real: Any = Encoding.chunks) -> Iterator[memoryview]:
        for chunk in real(encoding, start):
            yield chunk[: len(chunk) // 2]
            time.sleep(pause_s)
            yield chunk[len(chunk) // 2 :]

    return chunks


def is_read(source: Healing) -> bool:
    held = source._source._server._offers._held
    return held is not None and bool(held.readers)


class TestHolding:
    """The source's write, against a transfer that takes its time."""

    @pytest.fixture
    def transfer(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pair, Any]]:
        monkeypatch.setattr(Encoding, "chunks", slow_chunks(0.1))
        pair = Pair(stack, state_serving=StateServing.HOLD)
        pair.serve()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(pair.fetch)
            eventually(lambda: is_read(pair.source), "it is read")
            yield pair, running

    def test_a_commit_waits_for_the_reader(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        before = pair.weights()[0].clone()
        pair.source.release(is_committed=True)
        pair.weights()[0].zero_()
        running.result(5)
        pair.target.install(StepMachine())
        assert torch.equal(pair.weights()[1], before)

    def test_a_discard_does_not(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        began_at = time.monotonic()
        pair.source.release(is_committed=False)
        assert time.monotonic() - began_at < 5
        with pytest.raises(StateUnavailable):
            running.result(5)

    @pytest.mark.parametrize("quorum_id", [7, None], ids=["its quorum", "all"])
    def test_a_revoke_ends_the_transfer_on_both_sides(self, transfer: tuple[Pair, Any], quorum_id: int | None) -> None:
        pair, running = transfer
        for side in (pair.source, pair.target):
            side.revoke(quorum_id, "c is lost")
        pair.source.release(is_committed=True)
        with pytest.raises(StateUnavailable, match="given up: c is lost"):
            running.result(5)

    def test_an_older_revoke_does_nothing(self, transfer: tuple[Pair, Any]) -> None:
        pair, running = transfer
        for side in (pair.source, pair.target):
            side.revoke(6, "that is over")
        running.result(5)

    def test_after_a_revoke_no_transfer_begins(self, stack: ExitStack) -> None:
        pair = Pair(stack)
        pair.serve()
        pair.target.revoke(7, "c is lost")
        with pytest.raises(StateUnavailable, match="quorum 7 was revoked"):
            pair.fetch()


# -- replica groups under real daemons


class Three:
    """Groups a and c have trained two steps, b has not: it is to heal from a; c can stand in."""

    def __init__(self, job: Job, **options: Any) -> None:
        self.job = job
        job.start_managers("a", "b", "c")
        self.a, self.c = (job.rank(name, seed, actor=ACTOR, **options) for seed, name in ((1, "a"), (3, "c")))
        self.meet({"a": self.a, "c": self.c}, until=2)
        self.c.call("set_ballast", 3.0)
        self.b = job.rank("b", 2, actor=ACTOR, **options)

    def meet(self, ranks: dict[str, Rank], until: int) -> list[list[dict[str, Any]]]:
        return [pending.result() for pending in self.begin(ranks, until)]

    def begin(self, ranks: dict[str, Rank], until: int) -> list[Pending]:
        """The last one, without which no quorum can form, asks when all others wait."""
        *others, _ = ranks
        pending: list[Pending] = []
        for name, rank in ranks.items():
            pending.append(rank.begin("steps", until))
            if name in others:
                self.job.wait_joined(name)
        return pending

    def begin_standing(self, until: int) -> list[Pending]:
        """Where the quorum of a and c stands: b asks first, and is taken in at their next step."""
        of_b = self.b.begin("steps", until)
        self.job.wait_joined("b")
        return [of_b, *(rank.begin("steps", until) for rank in (self.a, self.c))]

    def heal_in_one_step(self, from_value: float) -> None:
        """b takes the state of the one with that ballast, whole, and from then on all commit together."""
        of_b, of_a, of_c = self.meet({"b": self.b, "a": self.a, "c": self.c}, until=4)
        check_healed(of_a, of_b, of_c)
        assert [step["committed"] for step in of_b] == [True, True], self.job.log("b")
        assert self.b.call("get_ballast") == {from_value}


def check_healed(*logs: list[dict[str, Any]]) -> None:
    """All hold the same bits after the last step, which they did together."""
    last = [log[-1] for log in logs]
    assert len({(step["step"], step["quorum_id"], step["hash"]) for step in last}) == 1
    assert all(step["committed"] for step in last)


def test_another_source_is_asked_in_the_same_step(job: Job) -> None:
    three = Three(job)
    three.a.call("advertise_checkpoints_at", f"http://{LOCALHOST}:{free_port()}")
    three.heal_in_one_step(from_value=3.0)


def test_over_the_process_group(job: Job) -> None:
    Three(job, heal_transport="process_group").heal_in_one_step(from_value=1.0)
    assert "sent the state" not in job.log("a"), "nothing went over HTTP"


def test_http_follows_where_the_process_group_fails(job: Job) -> None:
    three = Three(job, heal_transport="process_group", heal_timeout_s=20.0)
    three.a.call("break_groups")
    three.heal_in_one_step(from_value=1.0)
    assert "does not come over the process group" in job.log("b")


@pytest.fixture
def standing_job(store: str, rank_server: RankServer, tmp_path: Path, stack: ExitStack) -> Job:
    """Whose quorums are revoked when a participant is lost."""
    lighthouse = stack.enter_context(Lighthouse("--join-timeout", "2s", "--heartbeat-timeout", "2s"))
    return Job(lighthouse.address, store, rank_server, tmp_path, stack)


def test_a_source_that_stops_while_it_sends(standing_job: Job) -> None:
    """The step is lost with it; the transfer ends with the quorum, long before it would by itself. One that is killed:
    test_matrix.py."""
    three = Three(standing_job)
    three.a.call("stop_while_sending")
    of_b, _, of_c = three.begin_standing(until=6)
    eventually(lambda: state_of(three.a.pid) == "T", "a is stopped")
    standing_job.managers["a"].kill()
    began_at = time.monotonic()
    check_healed(log := of_b.result(), of_c.result())
    assert time.monotonic() - began_at < 30
    assert any(not step["committed"] for step in log)
    assert three.b.call("get_ballast") == {3.0}, standing_job.log("b")
    assert "healing from c" in standing_job.log("b")
