"""torchft's released ManagerServer, with its ManagerClient, against our lighthouse."""

from collections.abc import Iterator

import pytest

from tests.processes import LIGHTHOUSE_CODE, Lighthouse, eventually, run_cli
from tests.torchft.rounds import members, quorum_of, round_of, wait_for_state
from tests.torchft.stock import Stock, StockTorchft


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse("--min_replicas", "2", "--heartbeat_timeout_ms", "2000") as process:
        yield process


@pytest.fixture(autouse=True)
def shut_down(stock: StockTorchft) -> Iterator[None]:
    """A server that lives on would beat at whoever gets its lighthouse's port next."""
    yield
    for server in stock.servers:
        server.do("shutdown")
    stock.servers.clear()


def group(stock: StockTorchft, name: str, lighthouse: Lighthouse, ranks: int = 1) -> tuple[Stock, Stock]:
    """(server, client). The others' quorum waits for a group that is known."""
    server = stock.manager_server(name, lighthouse.address, ranks)
    eventually(lambda: name in members(lighthouse), f"{name} beats")
    return server, stock.manager_client(server.do("address"))


def test_two_groups_of_two_ranks_take_two_steps_in_one_quorum(stock: StockTorchft, lighthouse: Lighthouse) -> None:
    clients = {name: group(stock, name, lighthouse, ranks=2)[1] for name in ("a", "b")}
    first = quorum_of(round_of(clients, 0, ranks=2))
    assert first[1] == ["a", "b"]
    votes = [client.vote(rank, 0, True) for client in clients.values() for rank in range(2)]
    assert [vote.result(30) for vote in votes] == [True] * 4
    assert quorum_of(round_of(clients, 1, ranks=2)) == first
    after_a_discard, names = quorum_of(round_of(clients, 1, ranks=2, commit_failures=2))
    assert (names, after_a_discard > first[0]) == (["a", "b"], True)


def test_a_joiner_heals_from_the_members(stock: StockTorchft, lighthouse: Lighthouse) -> None:
    clients = {name: group(stock, name, lighthouse)[1] for name in ("a", "b")}
    first, _ = quorum_of(round_of(clients, 0))
    _, client = group(stock, "c", lighthouse)
    late = client.ask(0, 0)
    wait_for_state(lighthouse, "c", "joined")
    answers = [*round_of(clients, 5), late.result(30)]
    second, names = quorum_of(answers)
    assert (names, second > first) == (["a", "b", "c"], True)
    assert [answer["heal"] for answer in answers] == [False, False, True]
    assert [answer["max_step"] for answer in answers] == [5, 5, 5]
    assert [answer["max_world_size"] for answer in answers] == [2, 2, 2]
    assert answers[2]["recover_src_replica_rank"] == 0
    assert answers[0]["recover_dst_replica_ranks"] == [2]
    source = stock.manager_client(answers[2]["recover_src_manager_address"])
    assert source.do("_checkpoint_metadata", rank=0, timeout=10.0) == "a0"


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_group_that_ends_leaves_the_quorum(stock: StockTorchft, lighthouse: Lighthouse, is_killed: bool) -> None:
    clients = {name: group(stock, name, lighthouse)[1] for name in ("a", "b")}
    with StockTorchft() as other:
        server, client = group(other, "c", lighthouse)
        first, names = quorum_of(round_of(clients | {"c": client}, 0))
        assert names == ["a", "b", "c"]
        if is_killed:
            client.ask(0, 1)
            wait_for_state(lighthouse, "c", "joined")
            other.kill()
        else:
            server.do("shutdown")
    second, names = quorum_of(round_of(clients, 1))
    assert (names, second > first) == (["a", "b"], True)


def test_lighthouse_kill_ends_its_process(stock: StockTorchft, lighthouse: Lighthouse) -> None:
    with StockTorchft() as doomed:
        client = group(doomed, "c", lighthouse)[1]
        waiting = client.ask(0, 0)
        wait_for_state(lighthouse, "c", "joined")
        ended = run_cli(LIGHTHOUSE_CODE, "kill", "c", "--force", "--lighthouse", lighthouse.address, "--reason", "over")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert doomed.wait() == 1
        assert waiting.exception(30) is not None
    missing = run_cli(LIGHTHOUSE_CODE, "kill", "z", "--lighthouse", lighthouse.address)
    assert (missing.returncode, "no live replica group 'z'" in missing.stderr) == (1, True)
