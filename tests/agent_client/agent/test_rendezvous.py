"""Before its first quorum a rank waits for its group's store, and only for that."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from agent_client.agent.rendezvous import wait_for_store
from agent_client.errors import AgentError
from examples.ports import free_port
from tests.processes import LOCALHOST, Lighthouse, Manager


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    with Lighthouse() as process:
        yield process


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
