"""The options of an Agent: each is checked once, by its name."""

import dataclasses
import math
import threading
from concurrent.futures import Future
from typing import Any, get_type_hints

import pytest

from agent_client import Agent, AgentConfig, ConfigurationError
from agent_client.step.config import MAX_TIMEOUT_S, AgentOptions, config_of
from lighthouse_protocol.messages.session import Vote
from lighthouse_protocol.wire.streams import WATCH_REQUESTS

REFUSED: list[tuple[str, Any]] = [
    ("timeout_s", 0.0),
    ("timeout_s", 1.1e9),
    ("connect_timeout_s", -1.0),
    ("quorum_timeout_s", math.inf),
    ("heal_timeout_s", math.nan),
    ("process_group", "glue"),
    ("heal_mode", "stall"),
    ("reduce_dtype", "float16"),
    ("max_consecutive_discards", 0),
    ("manager_restart_timeout_s", -0.1),
    ("world_size_mode", "constant"),
    ("share_by_speed", True),
    ("check_state_every", -1),
    ("on_nonfinite", "ignore"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: "):
        AgentConfig(**{name: value})


def test_each_field_that_has_wrong_values_is_checked() -> None:
    unchecked = {"world_size", "advertise"}  # checked with world_size_mode; and by what resolves it
    assert {name for name, _ in REFUSED} | unchecked == {field.name for field in dataclasses.fields(AgentConfig)}


def test_the_longest_timeouts_together_can_be_waited_for_and_sent() -> None:
    config = AgentConfig(timeout_s=MAX_TIMEOUT_S, heal_timeout_s=MAX_TIMEOUT_S, connect_timeout_s=MAX_TIMEOUT_S)
    limit_s = config.timeout_s + config.heal_timeout_s
    answer = Future[bool]()
    threading.Timer(0.01, answer.set_result, [True]).start()
    assert answer.result(max(limit_s, 5 * config.connect_timeout_s))
    vote = Vote(1, 1, True, 1, True, limit_s)
    assert WATCH_REQUESTS.read(WATCH_REQUESTS.write(vote)) == vote


def test_a_manager_that_has_ended_need_not_be_waited_for() -> None:
    assert AgentConfig(manager_restart_timeout_s=0.0).manager_restart_timeout_s == 0.0


def test_from_env_has_an_option_for_each_field() -> None:
    """`AgentOptions` writes them a second time, for type checkers."""
    assert get_type_hints(AgentOptions) == get_type_hints(AgentConfig)


def test_an_option_that_does_not_fit_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the environment is read, by which rank 0 would start the group's manager."""
    monkeypatch.setattr("agent_client.step.agent.Environment.read", lambda: pytest.fail("too late"))
    with pytest.raises(ConfigurationError, match="^heal_mode: "):
        Agent.from_env(state=None, heal_mode="stall")  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_named_with_what_is_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"^Agent\.from_env has no option timeout; did you mean timeout_s\?"):
        config_of({"timeout": 5})
    with pytest.raises(ConfigurationError, match=r"no option xyz; its options are timeout_s, connect_timeout_s, "):
        config_of({"xyz": 5})
    assert config_of({"timeout_s": 5.0}) == AgentConfig(timeout_s=5.0)
