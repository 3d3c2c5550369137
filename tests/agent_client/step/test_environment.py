"""Where a rank learns who it is: each variable, each fallback, and errors that name what to set."""

import os

import pytest

from agent_client.errors import AgentError, ConfigurationError
from agent_client.step.environment import Environment, own_host

MANAGED = {"LIGHTHOUSE_MANAGER_ADDRESS": "here:29512"}
MEETING = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
ALONE = {"LIGHTHOUSE_ADDRESS": "there:29510", "REPLICA_GROUP_ID": "a"}
MONITORED = {"LIGHTHOUSE_GROUP_RANK": "0", "LIGHTHOUSE_GROUP_WORLD_SIZE": "1"}

FIELDS: list[tuple[dict[str, str], dict[str, object]]] = [
    (MANAGED, {"group_rank": 0, "group_world_size": 1, "manager": "here:29512", "lighthouse": "", "replica_id": ""}),
    (MANAGED, {"attempt": "0", "advertise": None}),
    (ALONE, {"manager": "", "lighthouse": "there:29510", "replica_id": "a"}),
    (MANAGED | {"WORLD_SIZE": "1", "RANK": "0"}, {"group_rank": 0, "group_world_size": 1}),
    (MANAGED | MEETING | {"RANK": "3", "WORLD_SIZE": "4"}, {"group_rank": 3, "group_world_size": 4}),
    (MANAGED | MONITORED | {"RANK": "3", "WORLD_SIZE": "4"}, {"group_rank": 0, "group_world_size": 1}),
    (MANAGED | {"TORCHELASTIC_RESTART_COUNT": "2"}, {"attempt": "2"}),
    (MANAGED | {"LIGHTHOUSE_MANAGER_ADVERTISE": "10.0.0.7"}, {"advertise": "10.0.0.7"}),
    (MANAGED | {"TORCHFT_LIGHTHOUSE": "http://old:1"}, {"lighthouse": "http://old:1"}),
    (MANAGED | {"TORCHFT_LIGHTHOUSE": "old:1", "LIGHTHOUSE_ADDRESS": "new:1"}, {"lighthouse": "new:1"}),
    (MANAGED | {"TORCHFT_LIGHTHOUSE": "old:1", "LIGHTHOUSE_ADDRESS": ""}, {"lighthouse": "old:1"}),
    (MANAGED | {"REPLICA_GROUP_ID": "b"}, {"replica_id": "b"}),
    (MANAGED | {"REPLICA_GROUP_ID": "b", "LIGHTHOUSE_MANAGER_REPLICA_ID": "c"}, {"replica_id": "c"}),
    (MANAGED | {"REPLICA_GROUP_ID": "b", "LIGHTHOUSE_MANAGER_REPLICA_ID": ""}, {"replica_id": "b"}),
]


@pytest.mark.parametrize(("variables", "expected"), FIELDS)
def test_each_variable_its_default_and_its_fallback(variables: dict[str, str], expected: dict[str, object]) -> None:
    found = Environment.read(variables)
    assert {name: getattr(found, name) for name in expected} == expected


KEPT = MANAGED | {"LIGHTHOUSE_KEEP_EVERY": "4", "LIGHTHOUSE_KEEPER": "/a:/b:/c:/d"}


@pytest.mark.parametrize(
    ("variables", "paths"),
    [
        ({"LOCAL_RANK": "1"}, ("/c", "/d")),
        ({"LOCAL_RANK": "1", "LIGHTHOUSE_KEEPER": "/a:/b"}, ("/a", "/b")),
        ({"LOCAL_RANK": "2"}, ()),
        ({"LIGHTHOUSE_KEEPER": ""}, ()),
    ],
)
def test_a_rank_without_memory_says_that_it_keeps_nothing(
    variables: dict[str, str], paths: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Environment.read(KEPT | variables).keeper
    assert keeper is not None
    assert (keeper.every, keeper.paths) == (4, paths)
    assert ("so this rank keeps no states" in caplog.text) is not bool(paths)


def test_it_reads_the_process_s_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LIGHTHOUSE_MANAGER_ADDRESS", "mine:1")
    assert Environment.read().manager == "mine:1"


def refused(variables: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        Environment.read(variables)
    assert isinstance(raised.value, AgentError)
    return str(raised.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "-1", "one", "1.0", " 1", "²", "٣"])
def test_what_is_no_number_is_named_with_its_value(name: str, text: str) -> None:
    assert refused(MANAGED | {name: text}).startswith(f"{name}={text!r} is not a number of at least ")


REFUSED: list[tuple[dict[str, str], list[str]]] = [
    (MANAGED | {"WORLD_SIZE": "0"}, ["WORLD_SIZE='0' is not a number of at least 1"]),
    (MANAGED | MEETING | {"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2", "group"]),
    ({"REPLICA_GROUP_ID": "a"}, ["LIGHTHOUSE_MANAGER_ADDRESS", "LIGHTHOUSE_ADDRESS", "is set", "lighthouse-manager"]),
    ({"LIGHTHOUSE_ADDRESS": "there:1"}, ["REPLICA_GROUP_ID is not set", "name"]),
    ({"LIGHTHOUSE_ADDRESS": "there:1", "REPLICA_GROUP_ID": ""}, ["REPLICA_GROUP_ID is not set", "name"]),
    ({"LIGHTHOUSE_ADDRESS": "there:1", "LIGHTHOUSE_MANAGER_REPLICA_ID": ""}, ["REPLICA_GROUP_ID is not set", "name"]),
    (MANAGED | {"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, ["MASTER_ADDR", "torchrun"]),
    (MANAGED | {"WORLD_SIZE": "2", "MASTER_ADDR": "host"}, ["MASTER_PORT", "torchrun"]),
]


@pytest.mark.parametrize(("variables", "words"), REFUSED)
def test_what_is_missing_or_wrong_is_named(variables: dict[str, str], words: list[str]) -> None:
    message = refused(variables)
    assert [word for word in words if word not in message] == []


def test_cleared_by_a_supervisor_rank_and_world_size_count():
    cleared = {"LIGHTHOUSE_GROUP_RANK": "", "LIGHTHOUSE_GROUP_WORLD_SIZE": "", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    found = Environment.read({"LIGHTHOUSE_MANAGER_ADDRESS": "h:1", "RANK": "2", "WORLD_SIZE": "4", **cleared})
    assert (found.group_rank, found.group_world_size) == (2, 4)


class TestOwnHost:
    def host(self, advertise: str | None = None, **variables: str) -> str:
        return own_host("127.0.0.1:1", advertise, variables)

    def test_an_interface_is_chosen_by_gloos_variable_or_by_nccls(self) -> None:
        assert self.host(GLOO_SOCKET_IFNAME="lo") == "127.0.0.1"
        assert self.host(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="nosuch") == "127.0.0.1"
        assert self.host(NCCL_SOCKET_IFNAME="=lo") == "127.0.0.1"
        assert self.host(GLOO_SOCKET_IFNAME="", NCCL_SOCKET_IFNAME="l") == "127.0.0.1"

    def test_an_address_that_was_asked_for_wins(self) -> None:
        assert self.host("10.0.0.7", GLOO_SOCKET_IFNAME="nosuch") == "10.0.0.7"

    @pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
    def test_an_interface_that_is_not_there_is_an_error(self, name: str) -> None:
        said = rf"^{name}: 'nosuch': this host has no interface 'nosuch'; it has .*lo \(127.0.0.1\)"
        with pytest.raises(ConfigurationError, match=said):
            self.host(**{name: "nosuch"})

    def test_an_address_that_is_none_is_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match="--advertise: 'a b' is not an address"):
            self.host("a b")
