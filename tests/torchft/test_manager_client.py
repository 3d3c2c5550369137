"""torchft's released ManagerClient against our manager. Who heals from whom at step 0: test_mixed.py."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from lighthouse_protocol.pb.torchft import torchft_pb2, torchft_pb2_grpc
from tests.processes import Lighthouse, Manager, eventually, http_json, together
from tests.torchft.rounds import quorum_of, round_of, wait_for_state
from tests.torchft.stock import Stock, StockError, StockTorchft


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse("--min-replicas", "2", "--heartbeat-timeout", "1s") as process:
        yield process


@pytest.fixture(scope="module")
def clients(stock: StockTorchft, lighthouse: Lighthouse) -> Iterator[dict[str, Stock]]:
    """Two groups for all tests: each test goes on from a step of its own."""
    a, b = (Manager(lighthouse.address, name, ranks=2) for name in ("a", "b"))
    with together(a, b):
        yield {"a": stock.manager_client(a.address), "b": stock.manager_client(b.address)}


@pytest.fixture
def step(_steps: Iterator[int] = itertools.count(100, 100)) -> int:  # noqa: B008 - one for the module
    return next(_steps)


def test_steps_in_one_quorum_with_commits(clients: dict[str, Stock], step: int) -> None:
    answers = round_of(clients, step, ranks=2)
    first = quorum_of(answers)
    assert first[1] == ["a", "b"]
    assert [answer["replica_rank"] for answer in answers] == [0, 0, 1, 1]
    assert [answer["replica_world_size"] for answer in answers] == [2] * 4
    assert [answer["store_address"] for answer in answers] == ["127.0.0.1:1"] * 4
    for now in (step, step + 1):
        votes = [client.vote(rank, now, True) for client in clients.values() for rank in range(2)]
        assert [vote.result(30) for vote in votes] == [True] * 4
        assert quorum_of(round_of(clients, now + 1, ranks=2)) == first


def test_one_no_discards_for_all_ranks_and_the_retry_commits(clients: dict[str, Stock], step: int) -> None:
    first, names = quorum_of(round_of(clients, step, ranks=2))
    votes = [clients["a"].vote(0, step, True), clients["a"].vote(1, step, False)]
    assert [vote.result(30) for vote in votes] == [False, False]
    second, again = quorum_of(round_of(clients, step, ranks=2, commit_failures=1))
    assert (again, second > first) == (names, True)
    votes = [clients["a"].vote(rank, step, True) for rank in range(2)]
    assert [vote.result(30) for vote in votes] == [True, True]


def test_the_one_behind_heals_and_finds_its_source(stock: StockTorchft, clients: dict[str, Stock], step: int) -> None:
    a0, a1, b0, b1 = round_of(clients, {"a": step + 7, "b": step + 3}, ranks=2)
    assert [answer["heal"] for answer in (a0, a1, b0, b1)] == [False, False, True, True]
    assert [answer["max_step"] for answer in (a0, a1, b0, b1)] == [step + 7] * 4
    assert [answer["max_replica_rank"] for answer in (a0, a1, b0, b1)] == [0, 0, None, None]
    source = stock.manager_client(b1["recover_src_manager_address"])
    assert source.do("_checkpoint_metadata", rank=1, timeout=10.0) == "a1"
    with pytest.raises(StockError, match="rank: is 2; the group has ranks 0 to 1"):
        source.do("_checkpoint_metadata", rank=2, timeout=10.0)


def test_shrink_only_keeps_the_newcomer_out_and_a_leaver_is_gone(
    stock: StockTorchft, clients: dict[str, Stock], lighthouse: Lighthouse, step: int
) -> None:
    first = quorum_of(round_of(clients, step, ranks=2))
    with Manager(lighthouse.address, "c", ranks=2) as manager:
        newcomer = stock.manager_client(manager.address)
        waiting = [newcomer.ask(rank, 0) for rank in range(2)]
        wait_for_state(lighthouse, "c", "joined")
        assert quorum_of(round_of(clients, step + 1, ranks=2, shrink_only=True)) == first
        assert not any(answer.done() for answer in waiting)
        answers = [*round_of(clients, step + 2, ranks=2), *(answer.result(30) for answer in waiting)]
        second, names = quorum_of(answers)
        assert names == ["a", "b", "c"]
        manager.kill()
    third, names = quorum_of(round_of(clients, step + 3, ranks=2))
    assert names == ["a", "b"]
    assert first[0] < second < third


def reason_of(call: Callable[[], "Future[Any]"]) -> str:
    """What a call was told that ran out of time. On a busy host its own deadline may come before the answer: again."""
    for _ in range(5):
        with pytest.raises(StockError) as e:
            call().result(30)
        assert e.value.kind == "TimeoutError"
        if "Timeout expired" not in str(e.value):
            break
    return str(e.value)


def test_a_missing_rank_is_named_when_the_time_is_over(clients: dict[str, Stock], step: int) -> None:
    reason = reason_of(lambda: clients["a"].ask(0, step, timeout=1.0))
    assert "ranks [1] of 2 have not asked for a quorum within" in reason
    round_of(clients, step, ranks=2)
    reason = reason_of(lambda: clients["a"].vote(0, step, True, timeout=1.0))
    assert "the other ranks of the group have not voted within" in reason


def test_a_refusal_is_a_runtime_error_that_names_the_field(clients: dict[str, Stock], step: int) -> None:
    with pytest.raises(StockError, match="rank: is 2; the group has ranks 0 to 1") as e:
        clients["a"].ask(2, step).result(30)
    assert e.value.kind == "RuntimeError"
    with pytest.raises(StockError, match="commit_failures: is -1"):
        clients["a"].ask(0, step, commit_failures=-1).result(30)
    with pytest.raises(StockError, match="step: is -1"):
        clients["a"].vote(0, -1, True).result(30)


def test_torchfts_kill_ends_the_manager_with_status_1(stock: StockTorchft, lighthouse: Lighthouse) -> None:
    with Manager(lighthouse.address, "doomed", ranks=2) as manager:
        waiting = stock.manager_client(manager.address).ask(0, 0)
        eventually(lambda: http_json(manager.http + "/status")["ranks_waiting"] == [0], "rank 0 waits")
        with grpc.insecure_channel(manager.address) as channel:
            torchft_pb2_grpc.ManagerServiceStub(channel).Kill(torchft_pb2.KillRequest(msg="time to go"), timeout=10)
        assert manager.wait() == 1
        assert "time to go" in manager.log()
        with pytest.raises(StockError, match="the manager of doomed is shutting down"):
            waiting.result(30)
