"""How the ranks of a group find each other, and that they wait for their group's store, and only for that."""

import dataclasses
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from agent_client import Agent, AgentConfig
from agent_client.errors import AgentError
from agent_client.manager_client.client import Presence
from agent_client.step.environment import Environment
from agent_client.step.rendezvous import MANAGER_KEY, GroupPlace, rendezvous, wait_for_store
from examples.ports import free_port
from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address, parse_address
from tests.processes import LOCALHOST, PATIENCE_S, Lighthouse, Manager


def test_a_store_that_serves_is_not_waited_for_and_one_that_comes_later_is(lighthouse: Lighthouse) -> None:
    port = free_port()
    with Manager(lighthouse.address, "a", "--store", f"{LOCALHOST}:{port}") as manager:
        listening = threading.Event()

        def serve() -> None:
            time.sleep(0.5)
            with socket.create_server((LOCALHOST, port)) as server:
                listening.set()
                server.accept()[0].close()

        store = threading.Thread(target=serve)
        store.start()
        wait_for_store(manager.address, 60.0)
        assert listening.is_set()
        store.join()


def test_one_that_does_not_come_is_named(lighthouse: Lighthouse) -> None:
    port = free_port()
    with Manager(lighthouse.address, "b", "--store", f"{LOCALHOST}:{port}") as manager:
        with pytest.raises(AgentError, match=rf"the group's store at \S*:{port} does not answer for 0.5 s; see its"):
            wait_for_store(manager.address, 0.5)


def test_a_manager_that_cannot_be_asked_is_the_quorum_request_s_to_report() -> None:
    wait_for_store(f"{LOCALHOST}:{free_port()}", 60.0)


# -- the address that the other ranks reach

ADVERTISED = "127.0.0.2"
GROUP_OF_TWO = Environment(
    group_rank=0,
    group_world_size=2,
    manager=f"{LOCALHOST}:1",
    lighthouse="",
    replica_id="",
    attempt="0",
    advertise=ADVERTISED,
)


def test_the_ranks_of_a_group_connect_where_each_advertises(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at the address that routes to MASTER_ADDR."""
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda _, rank, size: iter([(store, rank, size)]))
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)

    def meet(rank: int) -> GroupPlace:
        return rendezvous(dataclasses.replace(GROUP_OF_TWO, group_rank=rank), AgentConfig(advertise=ADVERTISED))[1]

    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(meet, (0, 1)))
    groups = [place.group for place in places if place.group is not None]
    ends = [[{end.getsockname()[0], end.getpeername()[0]} for end in group._connections._sockets] for group in groups]
    for group in groups:
        group.abort()
    assert [bool(of_rank) for of_rank in ends] == [True, True], "both are connected"
    assert all(ADVERTISED in each for of_rank in ends for each in of_rank)


def test_a_rank_does_not_meet_what_another_has_published_for_an_agent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may close its Agent and create another one: rank 1 is there first, and rank 0 takes a while."""
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda _, rank, size: iter([(store, rank, size)]))
    monkeypatch.setattr("agent_client.step.rendezvous.wait_for_store", lambda *_: None)
    monkeypatch.setattr("agent_client.step.rendezvous.START_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(Presence, "show", lambda *_: None)
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)

    def meet(rank: int, after_s: float) -> GroupPlace:
        time.sleep(after_s)
        return rendezvous(dataclasses.replace(GROUP_OF_TWO, group_rank=rank), AgentConfig())[1]

    def add_one(place: GroupPlace) -> float:
        assert place.group is not None
        place.group.all_reduce(ones := torch.ones(1), PATIENCE_S)
        return ones.item()

    before: list[GroupPlace] = []  # what belongs to an Agent may live longer than it
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            places = list(pool.map(meet, (0, 1), (0.5, 0.0)))
            assert list(pool.map(add_one, places)) == [2.0, 2.0]
            before += places
            for place in places:
                place.close()


@pytest.mark.parametrize(("option", "used"), [(None, ADVERTISED), ("127.0.0.3", "127.0.0.3")])
def test_the_option_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch, option: str | None, used: str) -> None:
    found: list[AgentConfig] = []

    def meet(_: Environment, config: AgentConfig) -> NoReturn:
        found.append(config)
        raise AgentError("enough")

    monkeypatch.setattr("agent_client.step.agent.rendezvous", meet)
    monkeypatch.setattr("agent_client.step.agent.Environment.read", lambda: GROUP_OF_TWO)
    with pytest.raises(AgentError, match="enough"):
        Agent.from_env(state=None, advertise=option)  # type: ignore[arg-type]
    assert [config.advertise for config in found] == [used]


# -- the secret of a group that starts its own manager


class FakeProcess:
    announced = "localhost:4711"


@pytest.mark.parametrize("token", ["lhj_a-token-of-some-length", ""])
def test_torchruns_open_store_does_not_hold_the_secret(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """Anyone can read the store. Each rank derives the secret from the join token that it has anyway."""
    store, given = HashStore(), dict[str, str]()

    def start(code: str, options: dict[str, str], *, name: str, variables: dict[str, str]) -> FakeProcess:
        given.update(variables)
        return FakeProcess()

    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda _, rank, size: iter([(store, rank, size)]))
    monkeypatch.setattr("agent_client.step.rendezvous.ServerProcess", start)
    monkeypatch.setattr("agent_client.step.rendezvous.wait_for_store", lambda address, timeout_s: None)
    monkeypatch.setattr("agent_client.step.rendezvous.GlooGroup", lambda *place, **options: object())
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)
    lighthouse = Coordinator((Address(LOCALHOST, 1),), "ab" * 32 if token else "", token).join_string()
    of_rank_0 = dataclasses.replace(GROUP_OF_TWO, manager="", lighthouse=lighthouse, replica_id="g")
    first, _ = rendezvous(of_rank_0, AgentConfig())
    second, _ = rendezvous(dataclasses.replace(of_rank_0, group_rank=1), AgentConfig())
    secret = given["LIGHTHOUSE_MANAGER_SECRET"]
    assert first == second
    assert secret in first
    stored = store.get(f"lighthouse/0/1/{MANAGER_KEY}").decode()
    assert (secret in stored) == (not token), "without a token all that reach the lighthouse may do all"
    assert not token or token not in stored
    if token:
        bare = dataclasses.replace(of_rank_0, group_rank=2, lighthouse="")
        with pytest.raises(AgentError, match="set LIGHTHOUSE_ADDRESS to the same join string for all ranks"):
            rendezvous(bare, AgentConfig())


@pytest.mark.parametrize("written", ["2600:1f18:4a3:6902:9df1:2d68:68e8:d613", "fd00::5", "::1", "fe80::1%eth0"])
@pytest.mark.parametrize("brackets", [False, True])
def test_the_master_may_have_any_address_of_ipv6(monkeypatch: pytest.MonkeyPatch, written: str, brackets: bool) -> None:
    asked: list[object] = []
    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda *_: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr("agent_client.step.rendezvous.own_host", lambda peer, _: asked.append(peer) or LOCALHOST)
    monkeypatch.setattr("agent_client.step.rendezvous.GlooGroup", mock.Mock())
    monkeypatch.setattr("agent_client.step.rendezvous.wait_for_store", lambda *_: None)
    monkeypatch.setenv("MASTER_ADDR", f"[{written}]" if brackets else written)
    rendezvous(GROUP_OF_TWO, AgentConfig())
    assert asked == [f"[{written.removesuffix('%eth0')}]:1"]
    assert parse_address(str(asked[0]), "master").host == written.removesuffix("%eth0")
    assert os.environ["MASTER_ADDR"] == written, "as torch takes it"
