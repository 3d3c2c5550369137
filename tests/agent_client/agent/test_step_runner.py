"""What the runner of a step makes of its failures."""

from types import SimpleNamespace
from typing import Any

import pytest

from agent_client.agent.config import AgentConfig
from agent_client.agent.step_runner import StepRunner
from agent_client.errors import ModelMismatch
from agent_client.healing.target import DoesNotFit
from tests.agent_client.agent.test_step import HEALING, computing


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(DoesNotFit("state\n  ['a']: a list\n", "['a']: a list"), "['a']: a list", id="with a difference"),
        pytest.param(DoesNotFit("the shards are others\nsee there"), "the shards are others", id="without one"),
    ],
)
def test_a_model_that_is_not_its_peers_is_told_with_what_does_not_fit(error: DoesNotFit, words: str) -> None:
    told: list[str] = []

    def install(*_: object) -> None:
        raise error

    manager: Any = SimpleNamespace(report=lambda text, ends_group: told.append(text))
    healing: Any = SimpleNamespace(install=install)
    peers: Any = None
    runner = StepRunner(computing(HEALING), manager, peers, healing, None, AgentConfig(), None)
    with pytest.raises(ModelMismatch) as caught:
        runner.install()
    assert str(caught.value).startswith(f"the state received does not fit the local one: {words}; this group's model")
    assert told == [f"ModelMismatch: {caught.value}"]
