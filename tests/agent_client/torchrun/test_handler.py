"""The handler by torch's own interface, several nodes in one process, each on a thread: what torch's tests of its
backends ask of one, and what ours does beyond."""

import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from agent_client.torchrun import handler as handlers
from agent_client.torchrun.handler import LighthouseRendezvous, create
from examples.ports import free_port
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.client.clients import LighthouseClient
from lighthouse_runtime.security import client_tls
from lighthouse_runtime.security.client_tls import variables_of
from lighthouse_runtime.security.credentials import load_or_make
from tests.daemons.mutual_tls import WORKER, Site
from tests.daemons.secured import EVERYWHERE, Secured
from tests.processes import PATIENCE_S, Lighthouse, eventually


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as lighthouse:
        yield lighthouse


class Nodes:
    """Of one job."""

    def __init__(self, endpoint: str, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        self.endpoint = endpoint
        self.run_id = uuid.uuid4().hex
        self._stack = stack
        self._pool = pool

    def make(self, min_nodes: int = 2, max_nodes: int = 2, **config: Any) -> LighthouseRendezvous:
        given = {"backend": "lighthouse", "endpoint": self.endpoint, "run_id": self.run_id, "local_addr": "127.0.0.1"}
        given |= {"min_nodes": min_nodes, "max_nodes": max_nodes, "last_call_timeout": "1"}
        given |= {"join_timeout": "100"} | config
        handler = create(RendezvousParameters(**given))
        self._stack.callback(leave, handler)
        return handler

    def join(self, *handlers: LighthouseRendezvous) -> list[RendezvousInfo]:
        """All of them, in the next round."""
        return [each.result(PATIENCE_S) for each in [self.wait(handler) for handler in handlers]]

    def wait(self, handler: LighthouseRendezvous) -> "Future[RendezvousInfo]":
        return self._pool.submit(handler.next_rendezvous)

    def states(self) -> list[str]:
        with LighthouseClient(self.endpoint) as client:
            found = [run for run in client.runs() if run.run == f"{self.run_id}.nodes"]
            return sorted(rank.state for run in found for rank in run.ranks)


def leave(handler: LighthouseRendezvous) -> None:
    """As when its process ends: no word to the others."""
    node = handler._node  # pyright: ignore[reportPrivateUsage]
    if node is not None:
        node.leave()


@pytest.fixture
def nodes(lighthouse: Lighthouse) -> Iterator[Nodes]:
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        yield Nodes(lighthouse.address, stack, pool)


def is_waiting(handler: LighthouseRendezvous) -> Callable[[], bool]:
    return lambda: handler.num_nodes_waiting() > 0


def before_serving(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Whatever node serves a round's store, `act` first."""

    def serve(*arguments: Any, is_master: bool, **others: Any) -> TCPStore:
        if is_master:
            act()
        return TCPStore(*arguments, is_master=is_master, **others)

    monkeypatch.setattr(handlers, "TCPStore", serve)


class TestWhatTorchAsksOfABackend:
    def test_the_store_is_shared(self, nodes: Nodes) -> None:
        first, second = (each.store for each in nodes.join(nodes.make(), nodes.make()))
        first.set("a", b"1")
        assert (second.get("a"), second.add("n", 2), first.add("n", 3)) == (b"1", 2, 5)
        second.multi_set(["b", "c"], [b"2", b"3"])
        assert first.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
        assert first.check(["a", "b"])
        assert not first.check(["z"])
        assert first.delete_key("a")
        assert first.compare_set("d", "", "4") == b"4"
        first.set_timeout(timedelta(seconds=0.2))
        assert first.timeout == timedelta(seconds=0.2)
        with pytest.raises(DistStoreError):
            first.get("never")
        with pytest.raises(DistStoreError):
            first.wait(["never"], timedelta(milliseconds=150))

    @pytest.mark.parametrize("is_shared", [True, False])
    def test_workers_find_the_round_s_store_or_serve_their_own_where_torch_s_variable_says_so(
        self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_shared: bool
    ) -> None:
        if not is_shared:
            monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        handlers = nodes.make(), nodes.make()
        infos = [each.bootstrap_store_info for each in nodes.join(*handlers)]
        assert infos[0] == infos[1]
        assert infos[0] is not None
        assert {handler.use_agent_store for handler in handlers} == {is_shared}
        host, port = infos[0].master_addr, infos[0].master_port
        TCPStore(host, port, is_master=not is_shared, wait_for_workers=False).set("by a worker", b"")

    def test_each_call_is_the_next_round_and_one_node_is_enough_where_the_minimum_is_one(self, nodes: Nodes) -> None:
        handler = nodes.make(1, 1, local_addr="127.0.0.2")
        infos = [handler.next_rendezvous() for _ in range(3)]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 1)] * 3
        stores = [info.bootstrap_store_info for info in infos]
        assert [store and store.master_addr for store in stores] == ["127.0.0.2"] * 3
        infos[0].store.set("of the first round", b"")
        assert not infos[2].store.check(["of the first round"])

    def test_the_last_call_waits_for_further_nodes_and_ends_with_the_maximum(self, nodes: Nodes) -> None:
        """The limit is above the test's patience: only the third node ends the wait."""
        handlers = [nodes.make(2, 3, last_call_timeout=str(2 * PATIENCE_S)) for _ in range(3)]
        waiting = [nodes.wait(handler) for handler in handlers[:2]]
        eventually(lambda: nodes.states() == ["ready", "ready"])
        assert not any(each.done() for each in waiting)
        told = [*nodes.join(handlers[2]), *(each.result(PATIENCE_S) for each in waiting)]
        assert sorted(each.rank for each in told) == [0, 1, 2]
        assert {each.world_size for each in told} == {3}

    @pytest.mark.parametrize("lost", [0, 1])
    def test_more_nodes_than_the_maximum_wait_as_spares(self, nodes: Nodes, lost: int) -> None:
        """Then one has all its time to meet the others, whoever serves the round's store."""
        members, spare = [nodes.make(), nodes.make()], nodes.make(join_timeout="5")
        ranks = [told.rank for told in nodes.join(*members)]
        members = [members[ranks.index(rank)] for rank in (0, 1)]
        waiting = nodes.wait(spare)
        eventually(lambda: nodes.states() == ["active", "active", "spare"])
        assert [member.num_nodes_waiting() for member in members] == [0, 0]
        threading.Event().wait(5.5)
        assert not waiting.done(), "no limit for spares"
        leave(members[lost])
        eventually(is_waiting(members[1 - lost]))
        nodes.join(members[1 - lost])
        assert waiting.result(PATIENCE_S).world_size == 2

    def test_a_late_node_is_waited_for_and_let_in(self, nodes: Nodes) -> None:
        members, late = [nodes.make(2, 3), nodes.make(2, 3)], nodes.make(2, 3)
        assert {each.world_size for each in nodes.join(*members)} == {2}
        assert [member.num_nodes_waiting() for member in members] == [0, 0]
        waiting = nodes.wait(late)
        for member in members:
            eventually(is_waiting(member))
        assert {each.world_size for each in [*nodes.join(*members), waiting.result(PATIENCE_S)]} == {3}
        assert {member.num_nodes_waiting() for member in (*members, late)} == {0}

    def test_too_few_nodes_time_out_and_may_try_again(self, nodes: Nodes) -> None:
        first = nodes.make(join_timeout="0.5")
        with pytest.raises(RendezvousTimeoutError, match=r"within 0\.5 s \(join_timeout\); are 2 nodes running\?"):
            first.next_rendezvous()
        assert not first.is_closed()
        eventually(lambda: "ready" not in nodes.states())
        again = nodes.make(join_timeout="60"), nodes.make(join_timeout="60")
        assert {each.world_size for each in nodes.join(*again)} == {2}

    def test_one_that_is_closed_stays_closed_for_all(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        nodes.join(first, second)
        first.set_closed()
        first.set_closed()
        assert first.is_closed()
        eventually(second.is_closed)
        assert second.num_nodes_waiting() == 0, "its workers may end by themselves"
        for handler in (first, second):
            with pytest.raises(RendezvousClosedError):
                handler.next_rendezvous()
        assert second.shutdown()

    def test_it_may_be_closed_before_a_round(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        waiting = nodes.wait(first)
        eventually(lambda: nodes.states() == ["ready"])
        second.set_closed()
        with pytest.raises(RendezvousClosedError):
            waiting.result(PATIENCE_S)

    def test_shutdown_closes_it(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        nodes.join(first, second)
        assert first.shutdown()
        assert first.shutdown(), "again"
        eventually(second.is_closed)

    def test_what_waits_for_a_round_ends_with_shutdown(self, nodes: Nodes) -> None:
        """A node that was in none closes nothing for the others; it is out itself."""
        first, second = nodes.make(), nodes.make()
        waiting = nodes.wait(first), nodes.wait(nodes.make())
        assert {each.result(PATIENCE_S).world_size for each in waiting} == {2}
        late = nodes.wait(second)
        eventually(lambda: "spare" in nodes.states())
        assert second.shutdown()
        with pytest.raises(RendezvousClosedError, match="it was shut down"):
            late.result(PATIENCE_S)
        with pytest.raises(RendezvousClosedError):
            second.next_rendezvous()
        assert not first.is_closed()

    def test_a_handler_that_was_shut_down_before_its_first_round_makes_none(self, nodes: Nodes) -> None:
        handler = nodes.make(1, 1)
        assert handler.shutdown()
        for method in (handler.next_rendezvous, handler.set_closed):
            with pytest.raises(RendezvousClosedError, match="it was shut down"):
                method()

    def test_an_end_that_cannot_be_told_is_said(self) -> None:
        """By False from shutdown, and by torch's timeout from set_closed; each within close_timeout."""
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack, Lighthouse() as lighthouse:
            nodes = Nodes(lighthouse.address, stack, pool)
            handler = nodes.make(1, 1, close_timeout="0.2")
            handler.next_rendezvous()
            lighthouse.kill()
            with pytest.raises(
                RendezvousTimeoutError, match=r"could not report to the lighthouse within 0\.2 s \(close_timeout\)"
            ):
                handler.set_closed()
            assert not handler.is_closed()
            assert not handler.shutdown()
            with pytest.raises(RendezvousClosedError, match="it was shut down"):
                handler.next_rendezvous()

    def test_a_lighthouse_that_goes_while_nodes_wait_is_a_lost_connection(self) -> None:
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack, Lighthouse() as lighthouse:
            nodes = Nodes(lighthouse.address, stack, pool)
            waiting = nodes.wait(nodes.make(join_timeout="2"))
            eventually(lambda: nodes.states() == ["ready"])
            lighthouse.kill()
            with pytest.raises(RendezvousConnectionError, match=r"--rdzv-endpoint: .* is it running\?"):
                waiting.result(PATIENCE_S)

    def test_a_spare_that_is_not_needed_is_told_so(self, nodes: Nodes) -> None:
        first, second, spare = nodes.make(), nodes.make(), nodes.make()
        nodes.join(first, second)
        waiting = nodes.wait(spare)
        eventually(lambda: "spare" in nodes.states())
        assert first.shutdown()
        with pytest.raises(RendezvousGracefulExitError):
            waiting.result(PATIENCE_S)


class TestWhatItDoesBeyond:
    def test_a_lost_node_is_told_at_once_whatever_the_rank(self, nodes: Nodes) -> None:
        """Whichever is lost, the others meet at another store, whose keys are of this round alone."""
        for lost in (0, 1, 2):
            handlers = [nodes.make(2, 3) for _ in range(3)]
            told = dict(zip(handlers, nodes.join(*handlers), strict=True))
            next(iter(told.values())).store.set("of the first round", b"")
            [victim] = [handler for handler in handlers if told[handler].rank == lost]
            others = [handler for handler in handlers if handler is not victim]
            leave(victim)
            for handler in others:
                eventually(is_waiting(handler))
            again = nodes.join(*others)
            assert sorted(each.rank for each in again) == [0, 1]
            assert not again[0].store.check(["of the first round"])
            assert others[0].shutdown()
            for handler in others:
                leave(handler)
            eventually(lambda: "active" not in nodes.states())

    def test_what_waits_in_the_store_ends_with_the_round(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        store, _ = (each.store for each in nodes.join(first, second))
        threading.Timer(0.3, leave, [second]).start()
        with pytest.raises(DistStoreError, match=r"the round is over, and one, two will not be set"):
            store.multi_get(["one", "two"])

    def test_a_failure_of_one_node_ends_the_round_and_is_its_own(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        nodes.join(first, second)
        assert not second.is_lost_elsewhere()
        waiting = nodes.wait(first)
        eventually(is_waiting(second))
        assert not second.is_lost_elsewhere(), "its failure would count"
        nodes.join(second)
        waiting.result(PATIENCE_S)

    def test_a_loss_is_not_the_failure_of_the_others(self, nodes: Nodes) -> None:
        first, second, third = (nodes.make(2, 3) for _ in range(3))
        nodes.join(first, second, third)
        leave(third)
        assert first.is_lost_elsewhere()
        assert second.is_lost_elsewhere()

    def test_a_node_that_has_finished_does_not_let_others_in(self, nodes: Nodes) -> None:
        first, second, late = (nodes.make(2, 3) for _ in range(3))
        nodes.join(first, second)
        first.finished()
        waiting = nodes.wait(late)
        eventually(lambda: "spare" in nodes.states())
        assert [each.num_nodes_waiting() for each in (first, second)] == [0, 0]
        second.finished()
        eventually(first.is_closed)
        with pytest.raises(RendezvousGracefulExitError):
            waiting.result(PATIENCE_S)

    def test_a_run_that_ends_while_nodes_meet_ends_their_wait(
        self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The node of rank 0 cannot serve the round's store, so its torchrun ends. The other waits for no store."""

        def fail() -> None:
            raise DistNetworkError("no port is free")

        before_serving(monkeypatch, fail)
        members = [nodes.make(), nodes.make()]
        waiting = dict(zip(members, map(nodes.wait, members), strict=True))
        [failed] = eventually(lambda: [each for each in members if waiting[each].done()])
        with pytest.raises(DistNetworkError, match="no port is free"):
            waiting.pop(failed).result()
        assert failed.shutdown()
        with pytest.raises(RendezvousClosedError, match="one of its nodes ended"):
            next(iter(waiting.values())).result(PATIENCE_S)

    def test_a_lighthouse_that_is_away_while_the_store_is_published_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be paused, or come back without its state."""
        bind = f"127.0.0.1:{free_port()}"
        monkeypatch.setattr(handlers, "CALL_TIMEOUT_S", 0.3)
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack, Lighthouse("--bind", bind) as lighthouse:
            nodes = Nodes(bind, stack, pool)

            def pause() -> None:
                lighthouse.signal(signal.SIGSTOP)
                threading.Timer(1.0, lighthouse.signal, [signal.SIGCONT]).start()

            def replace_it() -> None:
                monkeypatch.setattr(handlers, "TCPStore", TCPStore)
                lighthouse.kill()
                stack.enter_context(Lighthouse("--bind", bind))

            members = nodes.make(), nodes.make()
            for leave_for_a_while in (pause, replace_it):
                before_serving(monkeypatch, leave_for_a_while)
                assert {each.world_size for each in nodes.join(*members)} == {2}

    def test_one_that_stays_away_then_ends_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handlers, "CALL_TIMEOUT_S", 0.3)
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack, Lighthouse() as lighthouse:
            nodes = Nodes(lighthouse.address, stack, pool)
            before_serving(monkeypatch, lighthouse.kill)
            said = r"--rdzv-endpoint: the lighthouse has not stored where round 0 .* within 2 s \(join_timeout\)"
            with pytest.raises(RendezvousConnectionError, match=said):
                nodes.wait(nodes.make(1, 1, join_timeout="2")).result(PATIENCE_S)

    def test_a_node_that_has_finished_waits_for_the_others_without_the_lighthouse(self) -> None:
        """The others may still use its store."""
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack, Lighthouse() as lighthouse:
            nodes = Nodes(lighthouse.address, stack, pool)
            members = [nodes.make(2, 2, join_timeout="2") for _ in range(2)]
            nodes.join(*members)
            lighthouse.kill()
            for each in members:
                each.finished()
                eventually(lambda each=each: each._node.outcome is not None)
                assert each.num_nodes_waiting() == 0

    def test_the_same_run_id_may_be_launched_anew(self, nodes: Nodes) -> None:
        first, second = nodes.make(), nodes.make()
        nodes.join(first, second)
        assert first.shutdown()
        assert second.shutdown()
        eventually(lambda: "active" not in nodes.states())
        assert {each.world_size for each in nodes.join(nodes.make(), nodes.make())} == {2}

    def test_nodes_that_disagree_are_refused(self, nodes: Nodes) -> None:
        waiting = nodes.wait(nodes.make(2, 2, join_timeout="5"))
        eventually(lambda: nodes.states() == ["ready"])
        with pytest.raises(RendezvousStateError, match="terms"):
            nodes.make(2, 3).next_rendezvous()
        with pytest.raises(RendezvousTimeoutError):
            waiting.result(PATIENCE_S)

    def test_a_lighthouse_that_is_not_there_is_said_in_time(self) -> None:
        where = f"127.0.0.1:{free_port()}"
        params = RendezvousParameters("lighthouse", where, "r", 1, 1, connect_timeout="0.5")
        with pytest.raises(RendezvousConnectionError, match=rf"--rdzv-endpoint: {where} does not answer within 0\.5 s"):
            create(params).next_rendezvous()

    def test_a_join_string_without_tls_is_an_endpoint(self, nodes: Nodes) -> None:
        [told] = nodes.join(nodes.make(1, 1, endpoint=f"lighthouse://insecure.some-token@{nodes.endpoint}"))
        assert told.world_size == 1

    def test_the_variable_names_the_lighthouse_where_there_is_no_endpoint(
        self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ValueError, match="--rdzv-endpoint is empty, and LIGHTHOUSE_ADDRESS is not set"):
            nodes.make(endpoint="")
        monkeypatch.setenv("LIGHTHOUSE_ADDRESS", nodes.endpoint)
        [told] = nodes.join(nodes.make(1, 1, endpoint=""))
        assert told.world_size == 1

    def test_a_join_string_that_is_not_good_is_one_line_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not after connect_timeout: no retry makes it good. What named the lighthouse is named."""
        monkeypatch.setattr(client_tls, "_roots", {})
        other = load_or_make(tmp_path / "other", ()).ca_pin
        own = tmp_path / "own"
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            secured = Secured(stack.enter_context(Lighthouse(*EVERYWHERE, "--credentials", str(own))), own)
            good, viewer = secured.coordinator(Role.JOIN), secured.coordinator(Role.VIEW)
            guessed, wrong = replace(good, token="lhj_" + "guess" * 6), replace(good, ca_pin=other)
            nodes = Nodes(good.join_string(), stack, pool)
            assert nodes.join(nodes.make(1, 1))[0].world_size == 1
            for string, what in (
                (wrong, "127.0.0.1:[0-9]+ has a different CA than the join string"),
                (guessed, "the token is not one of this lighthouse's, or was rotated away: run `lighthouse token join"),
                (viewer, "needs a credential of role join"),
            ):
                monkeypatch.setattr(client_tls, "_roots", {})
                with pytest.raises(RendezvousConnectionError) as by_option:
                    nodes.make(1, 1, endpoint=string.join_string(), run_id=uuid.uuid4().hex).next_rendezvous()
                assert re.fullmatch(f"--rdzv-endpoint: .*{what}.*", str(by_option.value)), by_option.value
            monkeypatch.setenv("LIGHTHOUSE_ADDRESS", guessed.join_string())
            with pytest.raises(RendezvousConnectionError, match="^LIGHTHOUSE_ADDRESS: the token is not one"):
                nodes.make(1, 1, endpoint="", run_id=uuid.uuid4().hex).next_rendezvous()

    def test_a_certificate_by_the_variables_is_shown_to_a_lighthouse_of_ones_own_pki(
        self, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = Site(tmp_path)
        with site.lighthouse:
            with pytest.raises(RendezvousConnectionError, match="does not answer within 2 s"):
                nodes.make(1, 1, endpoint=site.address, connect_timeout="2").next_rendezvous()
            for name, path in variables_of(site.pki.files(site.pki.issue("node", WORKER))).items():
                monkeypatch.setenv(name, path)
            [told] = nodes.join(nodes.make(1, 1, endpoint=site.address))
            assert told.world_size == 1
