"""The documents' reading and recording names, against a real lighthouse."""

import pytest

from agent_client.errors import ConfigurationError
from agent_client.restart.store import StoreMixin
from tests.processes import Lighthouse, Process

SCRIPT = """
from agent_client import CallWrapper, StoreMixin, Wrapper
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.refusals import UnknownName

@Wrapper(use_global_iteration=True)
def train(call_wrapper: CallWrapper):
    store, state = StoreMixin(), call_wrapper.state
    assert store.get_iteration_for_rank(0) == 0
    store.set_key(KeyKind.JOB_RESTART, "reason", "none")
    assert store.get_key(KeyKind.JOB_RESTART, "reason") == "none"
    assert store.get_active_ranks_for_coordination(world_size=1, timeout=None) == {0}
    assert state.advance(store=store, world_size=1, timeout=None, is_coordinator=True) == 1
    assert store.handle_rank_restart(world_size=1, timeout=None) == 1
    assert store.get_iteration_for_rank(0) == 1 == store.get_global_iteration()
    assert state.sync_with_global_iteration(store) == 1
    assert store.previous[KeyKind.JOB_RESTART, "reason"] == "none"
    assert store.get_key(KeyKind.JOB_RESTART, "reason", generation=0) == "none"
    try:
        store.get_key(KeyKind.JOB_RESTART, "reason")
    except UnknownName as e:
        assert "job_restart_1_reason was not set" in str(e)
    else:
        raise AssertionError("a key of the generation before is none of this one")

train()
print("all is so")
"""


def test_outside_of_a_wrapped_function_there_is_no_number() -> None:
    with pytest.raises(ConfigurationError, match="no wrapped function"):
        StoreMixin().get_global_iteration()


def test_the_names_serve() -> None:
    with Lighthouse() as lighthouse, Process(SCRIPT, env={"LIGHTHOUSE_ADDRESS": lighthouse.address}) as rank:
        assert rank.wait() == 0, rank.log()
        assert "all is so" in rank.log()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("elect_coordinator", "needs no coordinator"),
        ("get_heartbeat", "`lighthouse ranks`"),
        ("GLOBAL_ITERATION_COUNTER", "get_global_iteration"),
        ("get_packed", "set_key"),
    ],
)
def test_a_name_without_a_counterpart_says_what_replaces_it(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'StoreMixin' object has no attribute '{name}'; .*{instead}"):
        getattr(StoreMixin(), name)
    with pytest.raises(AttributeError, match="no attribute 'another'$"):
        StoreMixin().another  # noqa: B018


def test_those_of_a_store_that_it_is_mixed_into_serve() -> None:
    class Own:
        def get(self, key: str) -> str:
            return key

        def __getattr__(self, name: str) -> str:
            return f"own {name}"

    class Mixed(StoreMixin, Own):
        pass

    assert (Mixed().get("k"), Mixed().set) == ("k", "own set")
