"""A process's place in its run, by who started it."""

import os
import socket
from typing import Any

import pytest

from agent_client.errors import ConfigurationError
from agent_client.restart.options import Launch, Options
from lighthouse_protocol.messages.run import RankId, RunTerms


def test_under_a_supervisor() -> None:
    launch = Launch.read(
        {
            "LIGHTHOUSE_ADDRESS": "h:1",
            "LIGHTHOUSE_RUN_ID": "run",
            "LIGHTHOUSE_SLOT": "5",
            "LIGHTHOUSE_WORLD_SIZE": "8",
            "LIGHTHOUSE_INCARNATION": "i",
            "LIGHTHOUSE_ATTEMPT": "2",
            "LIGHTHOUSE_ACTIVE_RANKS": "6",
            "LIGHTHOUSE_MIN_ACTIVE_RANKS": "4",
            "LIGHTHOUSE_STRIDE": "100",
            "RANK": "1",
            "WORLD_SIZE": "2",
        }
    )
    assert (launch.slot, launch.slots, launch.attempt, launch.run, launch.is_supervised) == (5, 8, 2, "run", True)
    budget: dict[str, Any] = {"max_restarts": 10, "restart_delay_s": 0.5}
    assert Options(use_global_iteration=True).terms(launch) == RunTerms(8, 6, 4, stride=100, **budget)
    chosen = Options(use_global_iteration=True, active_world_size=5, min_active=2, barrier_timeout=7, max_iterations=9)
    assert chosen.terms(launch) == RunTerms(8, 5, 2, stride=100, join_timeout_s=7.0, max_iterations=9, **budget)


def test_without_one_by_torchruns_variables() -> None:
    launch = Launch.read(
        {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "t"}
    )
    assert (launch.slot, launch.slots, launch.attempt, launch.run, launch.stride) == (3, 4, 1, "t", 100)
    assert not launch.is_supervised
    assert RankId(3, launch.incarnation).unit == "torchrun-1", "torchrun restarts them together"
    assert launch.incarnation != Launch.read({}).incarnation


def test_below_torchrun_below_a_supervisor() -> None:
    launch = Launch.read(
        {
            "LIGHTHOUSE_SLOT_OFFSET": "4",
            "LIGHTHOUSE_WORLD_SIZE": "8",
            "LIGHTHOUSE_INCARNATION": "s.u",
            "LIGHTHOUSE_ATTEMPT": "2",
            "LIGHTHOUSE_STRIDE": "100",
            "RANK": "1",
            "WORLD_SIZE": "4",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    assert (launch.slot, launch.slots, launch.attempt, launch.stride, launch.is_supervised) == (5, 8, 2, 100, True)
    assert launch.incarnation == f"s.u.{os.getpid()}"
    assert RankId(5, launch.incarnation).unit == RankId(4, "s.u.1").unit == "u"


def test_where_each_replica_group_restarts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"LIGHTHOUSE_SLOT": "5", "LIGHTHOUSE_WORLD_SIZE": "8", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in (place | {"LIGHTHOUSE_RUN_ID": "run", "REPLICA_GROUP_ID": "b"}).items():
        monkeypatch.setenv(name, value)
    chosen = Options(use_global_iteration=True, restart_scope="group")
    launch = chosen.launch()
    assert (launch.run, launch.slot, launch.slots, chosen.terms(launch).world_size) == ("run.b", 1, 2, 2)
    launch = Options(use_global_iteration=True).launch()
    assert (launch.run, launch.slot, launch.slots) == ("run", 5, 8)
    monkeypatch.delenv("REPLICA_GROUP_ID")
    with pytest.raises(ConfigurationError, match="REPLICA_GROUP_ID"):
        chosen.launch()


def test_a_spare_has_no_rank_that_it_could_read() -> None:
    assert Launch.read({"RANK": "", "LIGHTHOUSE_SLOT": "7", "LIGHTHOUSE_WORLD_SIZE": "8"}).slot == 7


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "0"), ("LIGHTHOUSE_STRIDE", "-1")])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Launch.read({name: value})


@pytest.mark.parametrize(
    "text", ["h:1", "h:1,i:2", f"lighthouse://{'a' * 64}.secret@h:1", "lighthouse://tls.t@h:1,i:2"]
)
def test_the_lighthouse_s_address_is_that_of_its_first_host_without_its_token(text: str) -> None:
    assert Launch.read({"LIGHTHOUSE_ADDRESS": text}).lighthouse_address == "h:1"
    assert Launch.read({}).lighthouse_address == ""


def unnamed(run: str = "a1b2", attempt: int = 0, rank: int = 0, **more: str) -> dict[str, str]:
    file = f"/tmp/torchelastic_x/none_{run}/attempt_{attempt}/{rank}/error.json"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "1"}
    return {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": file, **place, **more}


def test_torchrun_s_placeholder_is_no_name() -> None:
    """Its ranks have an id in common, also after a restart; a second job on the same host and port has another."""
    first = Launch.read(unnamed()).run
    assert first == f"torchrun-{socket.gethostname()}-a1b2"
    assert Launch.read(unnamed(attempt=2, rank=1)).run == first
    assert Launch.read(unnamed("c3")).run != first
    of_hosts = unnamed(GROUP_WORLD_SIZE="2", MASTER_ADDR="node-1")
    assert Launch.read(of_hosts).run == Launch.read(of_hosts | unnamed("c3", **of_hosts)).run == "torchrun-node-1-29500"
    assert Launch.read(unnamed(TORCHELASTIC_ERROR_FILE="")).run == "torchrun-127.0.0.1-29500"
    assert Launch.read(unnamed(TORCHELASTIC_RUN_ID="job-7")).run == "job-7"
    assert Launch.read(unnamed(LIGHTHOUSE_RUN_ID="none")).run == "none", "somebody wants it"
