"""The clients as torchft's Python uses them: what they answer and raise, and after a fork. What torchft's own raise:
tests/torchft."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from agent_client.torchft import LighthouseClient, ManagerClient, QuorumMember, QuorumResult, clients
from examples.ports import free_port
from lighthouse_protocol.pb.torchft import torchft_pb2
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, Manager, Process

LONG = timedelta(seconds=PATIENCE_S)
SHORT = timedelta(milliseconds=200)


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse("--min-replicas", "2", "--join-timeout", "600s") as process:
        yield process


@pytest.fixture(scope="module")
def manager(lighthouse: Lighthouse) -> Iterator[Manager]:
    with Manager(lighthouse.address, "waits", ranks=2) as process:
        yield process


@pytest.fixture
def alone() -> Iterator[Lighthouse]:
    with Lighthouse("--min-replicas", "1", "--join-timeout", "600s") as process:
        yield process


def ask(client: ManagerClient, group_rank: int = 0, timeout: timedelta = LONG, **more: Any) -> QuorumResult:
    usual: dict[str, Any] = {"step": 0, "checkpoint_metadata": f"at {group_rank}", "shrink_only": False}
    usual |= {"init_sync": True, "commit_failures": 0}
    return client._quorum(group_rank=group_rank, timeout=timeout, **(usual | more))  # pyright: ignore[reportPrivateUsage]


# -- answers


def test_a_quorum_of_the_lighthouse_has_what_each_member_told(lighthouse: Lighthouse) -> None:
    client = LighthouseClient(f"http://{lighthouse.address}", LONG)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.quorum, "one", LONG, data={"host": "h1", "ports": [1, 2]})
        second = pool.submit(client.quorum, "two", LONG, "http://m:1", "s:1", 3, 2, False)
    quorum = first.result()
    assert quorum == second.result()
    assert quorum.participants == [
        QuorumMember("one", "", "", 0, 0, False, {"host": "h1", "ports": [1, 2]}),
        QuorumMember("two", "http://m:1", "s:1", 3, 2, False, None),
    ]
    assert abs(quorum.created.seconds - time.time()) < PATIENCE_S
    assert 0 <= quorum.created.nanos < 10**9


def test_the_ranks_of_a_group_share_a_quorum_and_a_decision(alone: Lighthouse) -> None:
    with Manager(alone.address, "a_7", ranks=2) as manager, ThreadPoolExecutor() as pool:
        clients = [ManagerClient(f"http://{manager.address}", LONG) for _ in range(2)]
        results = list(pool.map(lambda rank: ask(clients[rank], rank), range(2)))
        assert results[0] == results[1]
        assert results[0] == QuorumResult(
            quorum_id=results[0].quorum_id,
            store_address=manager.store_address,
            max_replica_rank=0,
            replica_ids=results[0].replica_ids,
        )
        assert [name.split(":")[0] for name in results[0].replica_ids] == ["a_7"]
        assert clients[0]._checkpoint_metadata(1, timeout=LONG) == "at 1"  # pyright: ignore[reportPrivateUsage]
        assert list(pool.map(lambda rank: clients[rank].should_commit(rank, 0, True, LONG), range(2))) == [True] * 2
        assert {one.max_step for one in pool.map(lambda rank: ask(clients[rank], rank, step=1), range(2))} == {1}
        votes = pool.map(lambda rank: clients[rank].should_commit(rank, 1, rank == 0, LONG), range(2))
        assert list(votes) == [False] * 2


# -- exceptions

CALLS: dict[str, Callable[[LighthouseClient, ManagerClient], object]] = {
    "quorum of the lighthouse": lambda lighthouse, manager: lighthouse.quorum("joins", SHORT),
    "quorum": lambda lighthouse, manager: ask(manager, timeout=SHORT),
    "vote": lambda lighthouse, manager: manager.should_commit(0, 0, True, SHORT),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_runs_out_of_time_raises_timeout_error(
    call: Callable[[LighthouseClient, ManagerClient], object], lighthouse: Lighthouse, manager: Manager
) -> None:
    """With torchft's text, and the reason."""
    clients = LighthouseClient(lighthouse.address, LONG), ManagerClient(manager.address, LONG)
    began_at = time.monotonic()
    with pytest.raises(TimeoutError, match='^status: Cancelled, message: "Timeout expired", details: .+'):
        call(*clients)
    assert time.monotonic() - began_at >= SHORT.total_seconds() / 2


def test_whatever_else_fails_is_a_runtime_error(lighthouse: Lighthouse, manager: Manager) -> None:
    asks, joins = ManagerClient(manager.address, LONG), LighthouseClient(lighthouse.address, LONG)
    with pytest.raises(RuntimeError, match="ranks 0 to 1"):
        ask(asks, group_rank=7)
    with pytest.raises(RuntimeError, match="^rank: is 5"):
        asks._checkpoint_metadata(5, LONG)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RuntimeError, match="replica_id"):
        joins.quorum("", LONG)
    with pytest.raises(RuntimeError, match=r"^data: .*JSON"):
        joins.quorum("a", LONG, data={"thing": object()})


@pytest.mark.parametrize("kind", [LighthouseClient, ManagerClient])
def test_a_client_that_cannot_connect_is_a_runtime_error_in_time(kind: Callable[[str, timedelta], object]) -> None:
    began_at = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^failed to connect: .*within 0.2 s.*longer connect_timeout"):
        kind(f"http://{LOCALHOST}:{free_port()}", SHORT)
    assert SHORT.total_seconds() <= time.monotonic() - began_at < PATIENCE_S
    with pytest.raises(RuntimeError, match="is not an address"):
        kind("no address", SHORT)


@pytest.mark.parametrize("kind", [LighthouseClient, ManagerClient])
def test_a_client_that_is_early_waits_for_its_server(kind: Callable[[str, timedelta], object]) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(kind, f"http://{LOCALHOST}:{port}", LONG)
        with Lighthouse("--bind", f"{LOCALHOST}:{port}"):
            assert isinstance(connecting.result(), kind)  # type: ignore[arg-type]


def test_a_server_that_has_gone_is_a_runtime_error_at_once() -> None:
    with Lighthouse() as lighthouse:
        client = LighthouseClient(lighthouse.address, LONG)
        assert client.heartbeat("a") is None
    began_at = time.monotonic()
    with pytest.raises(RuntimeError, match="unreachable"):
        client.quorum("a", LONG)
    assert time.monotonic() - began_at < LONG.total_seconds() / 2


# -- threads and forks


def test_waiting_leaves_the_interpreter_to_others(lighthouse: Lighthouse) -> None:
    client = LighthouseClient(lighthouse.address, LONG)
    counted = 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.quorum, "slow", SHORT)
        while not waiting.done():
            counted += 1
            time.sleep(0.001)
    assert isinstance(waiting.exception(), TimeoutError)
    assert counted > 10


FORKING = """
import os, sys, time
from datetime import timedelta
from agent_client.torchft import LighthouseClient, LighthouseServer
LONG = timedelta(seconds=60)
server = LighthouseServer("127.0.0.1:0", 1)
client = LighthouseClient(server.address(), LONG)
client.quorum("a", LONG)
children = []
for name in ("uses it", "does not"):
    child = os.fork()
    if child == 0:
        if name == "uses it":
            try:
                client.heartbeat("child")
            except RuntimeError as e:
                print(e)
        sys.exit(0)  # its finalizers run; what is its parent's must go on
    children.append(child)
client.quorum("a", LONG)
ended = [os.waitpid(child, 0)[1] for child in children]
client.quorum("a", LONG)
print("children ended with", ended)
"""


def test_a_client_and_its_server_survive_forks() -> None:
    """A child is told that it cannot use the client (torchft's hangs), and its end ends nothing of its parent's."""
    with Process(FORKING) as process:
        assert process.wait() == 0, process.log()
        assert "was forked from one that uses gRPC" in process.log(), process.log()
        assert "children ended with [0, 0]" in process.log(), process.log()


def test_every_field_of_a_result() -> None:
    expected = QuorumResult(
        quorum_id=1,
        replica_rank=2,
        replica_world_size=3,
        recover_src_manager_address="http://m:1",
        recover_src_replica_rank=0,
        recover_dst_replica_ranks=[4, 5],
        store_address="s:1",
        max_step=6,
        max_replica_rank=0,
        max_world_size=7,
        heal=True,
        commit_failures=8,
        replica_ids=["a", "b"],
    )
    fields = {name: getattr(expected, name) for name in QuorumResult.__slots__}
    assert clients.quorum_result(torchft_pb2.ManagerQuorumResponse(**fields)) == expected


def test_who_does_not_heal_has_no_source_and_who_is_behind_no_rank() -> None:
    """0 is a rank; None is not."""
    missing = clients.quorum_result(torchft_pb2.ManagerQuorumResponse(replica_rank=1))
    assert (missing.recover_src_replica_rank, missing.max_replica_rank) == (None, None)
