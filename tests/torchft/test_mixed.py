"""Our manager and torchft's in one quorum: both must come to one and the same assignment."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lighthouse_runtime.client.clients import ManagerClient
from tests.processes import Lighthouse, Manager, together
from tests.torchft.rounds import Answer, quorum_of, round_of, wait_for_state
from tests.torchft.stock import Stock, StockTorchft

RANKS = 2
NAMES = ("a", "b", "c")


@contextlib.contextmanager
def clients_of(stock: StockTorchft, ours: str) -> Iterator[dict[str, Stock]]:
    """A client for each of NAMES; those in `ours` talk to our manager, the others to torchft's."""
    with Lighthouse("--min-replicas", "3") as lighthouse:
        managers = [Manager(lighthouse.address, name, store=_store(name), ranks=RANKS) for name in ours]
        with together(*managers):
            addresses = dict(zip(ours, (manager.address for manager in managers), strict=True))
            for name in set(NAMES) - set(ours):
                server = stock.manager_server(name, lighthouse.address, RANKS, store_addr=_store(name))
                addresses[name] = server.do("address")
            yield {name: stock.manager_client(addresses[name]) for name in NAMES}
            for server in stock.servers:
                server.do("shutdown")
            stock.servers.clear()


def _store(name: str) -> str:
    return f"127.0.0.1:{ord(name)}"


def meaning(answer: Answer) -> dict[str, Any]:
    """Without the names of one run: the id, and the port of the source."""
    changing = {"quorum_id", "recover_src_manager_address"}
    return {name: value for name, value in answer.items() if name not in changing}


ROUNDS: list[tuple[Mapping[str, int], bool]] = [
    ({"a": 0, "b": 0, "c": 0}, True),
    ({"a": 0, "b": 0, "c": 0}, False),
    ({"a": 5, "b": 3, "c": 4}, True),
    ({"a": 5, "b": 5, "c": 4}, True),
    ({"a": 5, "b": 5, "c": 5}, True),
    ({"a": 6, "b": 6, "c": 6}, False),
]


def play(stock: StockTorchft, ours: str) -> list[list[dict[str, Any]]]:
    told = []
    with clients_of(stock, ours) as clients:
        for steps, init_sync in ROUNDS:
            answers = round_of(clients, steps, RANKS, init_sync=init_sync)
            assert quorum_of(answers)[1] == list(NAMES)
            told.append([meaning(answer) for answer in answers])
    return told


@pytest.fixture(scope="module")
def torchfts_answers(stock: StockTorchft) -> list[list[dict[str, Any]]]:
    return play(stock, "")


@pytest.mark.parametrize("ours", ["b", "ac", "abc"])
def test_who_manages_a_group_changes_nothing_for_anybody(
    stock: StockTorchft, torchfts_answers: list[list[dict[str, Any]]], ours: str
) -> None:
    assert play(stock, ours) == torchfts_answers


def test_a_caller_that_names_no_world_size_does_not_break_our_managers(stock: StockTorchft) -> None:
    """torchft's LighthouseClient says world_size 0 by default."""
    with Lighthouse("--min-replicas", "2") as lighthouse, Manager(lighthouse.address, "a") as manager:
        script = stock.lighthouse_client(lighthouse.address).join("b")
        wait_for_state(lighthouse, "b", "joined")
        with ManagerClient(manager.address) as rank:
            answer = rank.quorum(0, 0, timeout_s=20)
        assert answer.replica_ids == ("a", "b")
        assert script.result(30)["quorum_id"] == answer.quorum_id
