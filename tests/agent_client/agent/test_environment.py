"""Where a rank learns who it is: each variable, each fallback, and errors that name what to set."""

import os
import re

import pytest

from agent_client.agent.environment import Environment
from agent_client.errors import AgentError, ConfigurationError

MANAGED = {"LIGHTHOUSE_MANAGER_ADDRESS": "here:29512"}
ALONE = {"LIGHTHOUSE_ADDRESS": "there:29510", "REPLICA_GROUP_ID": "a"}


def test_a_rank_with_a_manager_needs_nothing_else() -> None:
    assert Environment.read(MANAGED) == Environment(
        group_rank=0,
        group_world_size=1,
        manager="here:29512",
        lighthouse="",
        replica_id="",
        attempt="0",
        advertise=None,
    )


def test_a_rank_without_one_needs_a_lighthouse_and_a_name() -> None:
    found = Environment.read(ALONE)
    assert (found.manager, found.lighthouse, found.replica_id) == ("", "there:29510", "a")


def test_all_variables_of_a_rank_under_torchrun() -> None:
    found = Environment.read(
        MANAGED
        | {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "host",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "LIGHTHOUSE_MANAGER_ADVERTISE": "10.0.0.7",
        }
    )
    assert (found.group_rank, found.group_world_size, found.attempt, found.advertise) == (3, 4, "2", "10.0.0.7")


@pytest.mark.parametrize(
    ("field", "variables", "expected"),
    [
        ("lighthouse", {"TORCHFT_LIGHTHOUSE": "http://old:1"}, "http://old:1"),
        ("lighthouse", {"TORCHFT_LIGHTHOUSE": "old:1", "LIGHTHOUSE_ADDRESS": "new:1"}, "new:1"),
        ("lighthouse", {"TORCHFT_LIGHTHOUSE": "old:1", "LIGHTHOUSE_ADDRESS": ""}, "old:1"),
        ("replica_id", {"REPLICA_GROUP_ID": "b"}, "b"),
        ("replica_id", {"REPLICA_GROUP_ID": "b", "LIGHTHOUSE_MANAGER_REPLICA_ID": "c"}, "c"),
        ("replica_id", {"REPLICA_GROUP_ID": "b", "LIGHTHOUSE_MANAGER_REPLICA_ID": ""}, "b"),
    ],
)
def test_fallbacks(field: str, variables: dict[str, str], expected: str) -> None:
    assert getattr(Environment.read(MANAGED | variables), field) == expected


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


def test_a_group_has_at_least_one_rank() -> None:
    assert refused(MANAGED | {"WORLD_SIZE": "0"}) == "WORLD_SIZE='0' is not a number of at least 1"


@pytest.mark.parametrize("rank", ["2", "3"])
def test_a_rank_beyond_the_group_names_both(rank: str) -> None:
    message = refused(MANAGED | {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"})
    assert f"RANK={rank}" in message
    assert "WORLD_SIZE=2" in message
    assert "group" in message, "whose ranks they count"


def test_neither_manager_nor_lighthouse() -> None:
    message = refused({"REPLICA_GROUP_ID": "a"})
    assert re.search(r"LIGHTHOUSE_MANAGER_ADDRESS.*LIGHTHOUSE_ADDRESS.*is set", message)
    assert "lighthouse-manager" in message
    assert "starts a manager" in message


@pytest.mark.parametrize("empty", [{}, {"REPLICA_GROUP_ID": ""}, {"LIGHTHOUSE_MANAGER_REPLICA_ID": ""}])
def test_a_lighthouse_and_no_name(empty: dict[str, str]) -> None:
    message = refused({"LIGHTHOUSE_ADDRESS": "there:1"} | empty)
    assert message.startswith("REPLICA_GROUP_ID is not set")
    assert "name" in message


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "MASTER_ADDR"), ({"MASTER_PORT": "29500"}, "MASTER_ADDR"), ({"MASTER_ADDR": "host"}, "MASTER_PORT")],
)
def test_several_ranks_and_no_place_to_meet(given: dict[str, str], missing: str) -> None:
    message = refused(MANAGED | {"WORLD_SIZE": "2"} | given)
    assert missing in message
    assert "torchrun" in message


def test_one_rank_needs_no_place_to_meet() -> None:
    assert Environment.read(MANAGED | {"WORLD_SIZE": "1", "RANK": "0"}).group_world_size == 1
