"""One interpreter with torch for all tests of the Agent: forking a rank from it takes milliseconds."""

from collections.abc import Iterator

import pytest

from tests.agent_client.ranks import RankServer


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    with RankServer() as server:
        yield server


@pytest.fixture(scope="module")
def store(rank_server: RankServer) -> Iterator[str]:
    """The address of a TCPStore in a process of its own."""
    with rank_server.start("tests.agent_client.actors:StoreActor") as host:
        yield host.call("serve")
