"""A rank that is observed: one watch, which leaves before its connection closes, and none beside an Agent."""

import importlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from agent_client.step import observer
from agent_client.step.observer import observe, stop_observing
from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.session import FromRank, WatchHello
from lighthouse_runtime.client.clients import ManagerClient
from tests.agent_client.manager_client.fake_watch import FakeWatch
from tests.processes import eventually


class Manager:
    """`done`: what has come to it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.hellos: list[WatchHello] = []
        monkeypatch.setattr(ManagerClient, "watch", lambda _, hello, **__: self._open(hello))
        monkeypatch.setattr(ManagerClient, "close", lambda _: self.done.append("closed"))
        for name, value in {"LIGHTHOUSE_MANAGER_ADDRESS": "127.0.0.1:1", "RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setattr(observer, "_present", None)
        monkeypatch.setattr(observer, "_is_superseded", False)

    def _open(self, hello: WatchHello) -> FakeWatch:
        self.hellos.append(hello)
        manager = self

        class Watch(FakeWatch):
            def send(self, message: FromRank) -> None:
                manager.done.append(type(message).__name__)

            def end(self) -> None:
                manager.done.append("ended")
                super().end()

        return Watch()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    return Manager(monkeypatch)


def test_it_is_watched_once_and_leaves_when_something_else_tells_where_it_is(manager: Manager):
    observe()
    observe()
    eventually(lambda: manager.hellos, "a watch")
    [hello] = manager.hellos
    assert (hello.group_rank, hello.is_observer) == (1, True)
    stop_observing()
    assert manager.done == ["Leaving", "ended", "closed"]
    observe()
    assert len(manager.hellos) == 1


def test_beside_an_agent_it_is_not(manager: Manager):
    stop_observing()
    observe()
    assert observer._present is None


HALF_IMPORTED = """
import threading
go_on = threading.Event()
go_on.wait(60)

class Store:
    def check(self, keys):
        return True

    def get(self, key):
        return b"127.0.0.1:1 open 00"

def is_initialized():
    return True

def _get_default_store():
    return Store()
"""


def test_a_script_that_is_importing_torch_is_observed_when_it_has(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "half_imported_torch.py").write_text(HALF_IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(observer, "TORCH_GROUPS", "half_imported_torch")
    monkeypatch.setattr(observer, "RETRY_S", 0.01)
    monkeypatch.delenv("LIGHTHOUSE_MANAGER_ADDRESS")
    monkeypatch.setenv("LIGHTHOUSE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("REPLICA_GROUP_ID", "a")
    script = threading.Thread(target=importlib.import_module, args=("half_imported_torch",))
    script.start()
    half = eventually(lambda: sys.modules.get("half_imported_torch"), "the import has begun")
    eventually(lambda: hasattr(half, "go_on"), "it goes on")
    observe()
    time.sleep(0.1)  # it looks meanwhile
    half.go_on.set()
    script.join()
    eventually(lambda: manager.hellos, "a watch")
    stop_observing()
    del sys.modules["half_imported_torch"]


def test_the_script_s_open_store_does_not_hold_the_secret(manager: Manager, monkeypatch: pytest.MonkeyPatch):
    """Anyone can read the store. Each rank derives the secret from the join token that it has anyway."""
    token, store, given, addresses = "lhj_a-token-of-some-length", HashStore(), dict[str, str](), list[str]()

    def start(code: str, options: dict[str, str], *, name: str, variables: dict[str, str]) -> object:
        given.update(variables)
        return SimpleNamespace(announced="localhost:4711", stop=lambda: None)

    def connect(address: str) -> ManagerClient:
        addresses.append(address)
        return ManagerClient(address)

    monkeypatch.setattr("agent_client.step.rendezvous.ServerProcess", start)
    monkeypatch.setattr(observer, "_script_store", lambda: store)
    monkeypatch.setattr(observer, "ManagerClient", connect)
    monkeypatch.delenv("LIGHTHOUSE_MANAGER_ADDRESS")
    monkeypatch.setenv("LIGHTHOUSE_ADDRESS", Coordinator((Address("127.0.0.1", 1),), "ab" * 32, token).join_string())
    monkeypatch.setenv("REPLICA_GROUP_ID", "a")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(observer, "_is_superseded", False)
        monkeypatch.setattr(observer, "_present", None)
        observe()
        eventually(lambda rank=rank: len(manager.hellos) > int(rank), "a watch")
        stop_observing()
    secret, stored = given["LIGHTHOUSE_MANAGER_SECRET"], store.get(observer.MANAGER_KEY).decode()
    assert secret not in stored
    assert token not in stored
    assert addresses[0] == addresses[1]
    assert secret in addresses[0]
