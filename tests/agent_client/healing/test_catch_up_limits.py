"""An Agent with heal_mode="catch_up", without peers: what it refuses, and what it says of itself."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_client.errors import ConfigurationError
from agent_client.state.train_state import TrainState
from agent_client.step.agent import Agent
from agent_client.step.config import AgentConfig
from agent_client.step.rules.world_size import Share
from agent_client.training.checkpoint_folder import CheckpointFolder
from lighthouse_protocol.messages.membership import Tag
from tests.agent_client.healing.test_catch_up_rules import lead
from tests.agent_client.state.test_train_state import Counting


class Counter:
    """Moves with the steps, and does not say how."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Replayed(Counter):
    def replay_step(self) -> None:
        pass


def agent_of(**others: Any) -> Agent:
    model = torch.nn.Linear(2, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), **others)
    return Agent("127.0.0.1:1", state=state, config=AgentConfig(heal_mode="catch_up"))


def test_what_moves_in_a_way_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'counter', a Counter.*replay_step\(\).*heal_mode='blocking'"):
        agent_of(counter=Counter())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ConfigurationError, match="'plateau', a ReduceLROnPlateau"):
        agent_of(plateau=plateau)
    agent_of(counter=Replayed()).close()


def test_an_extra_state_that_moves_in_the_forward_pass_is_refused() -> None:
    """It is no part of the kept steps, so it would stay behind that of the peers."""
    model = torch.nn.Sequential(Counting({"passes": 0}))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Agent("127.0.0.1:1", state=state, config=AgentConfig(heal_mode="catch_up")) as agent:
        state.begin_step()
        agent.internals._check_script()
        model(torch.ones(1))
        with pytest.raises(ConfigurationError, match=r"not with 0\._extra_state, which changes in the forward pass"):
            agent.internals._check_script()


def test_a_step_without_the_optimizer_that_can_apply_it_later_is_refused() -> None:
    with agent_of() as agent, pytest.raises(ConfigurationError, match="FaultTolerantOptimizer"):
        agent.start_quorum()


def test_a_rank_that_catches_up_is_known_by_what_it_holds_and_writes_no_checkpoint(tmp_path: Path) -> None:
    with agent_of() as agent:
        catch_up = agent.internals.catch_up_for(agent.state.optimizer)
        assert catch_up is not None
        catch_up.machine.choose_action(lead(Tag(7, 3)), Tag(0, 0))
        agent.internals.machine.work_at(7, 3)
        folder = CheckpointFolder(tmp_path, agent)
        assert (agent.catches_up, agent.current_step, folder.save()) == (True, 7, None)
        assert agent.state_dict() == {"step": 0, "tag_quorum_id": 0, "batches_committed": 0}
        catch_up.machine.choose_action(lead(Tag(0, 0), catches_up=False, source=""), Tag(0, 0))
        agent.internals.machine.work_at(0, 0)
        assert folder.save() is not None


def test_the_batches_of_a_step_that_is_applied_later_are_those_that_its_peers_count() -> None:
    with agent_of() as agent:
        machine, catch_up = agent.internals.machine, agent.internals.catch_up_for(agent.state.optimizer)
        assert catch_up is not None
        catch_up.begin_step()
        catch_up.machine.choose_action(lead(Tag(7, 3)), Tag(0, 0))
        machine.share, machine.skipped_weight = Share((0,), 3, counts=False), 1
        catch_up.apply()
        assert [kept.batches for kept in catch_up.machine.kept_steps] == [machine.batches] == [3]


def test_a_parameter_group_that_comes_while_a_rank_catches_up_is_refused() -> None:
    """The kept gradients are those of the groups before it."""
    with agent_of() as agent:
        catch_up = agent.internals.catch_up_for(agent.state.optimizer)
        assert catch_up is not None
        agent.state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        catch_up.begin_step()
        catch_up.machine.choose_action(lead(Tag(7, 3), names="ab"), Tag(0, 0))
        catch_up.apply()
        agent.state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ConfigurationError, match=r"not with a parameter group .* heal_mode='blocking'"):
            catch_up.apply()


def test_a_kept_gradient_is_no_part_of_a_ddp_bucket() -> None:
    """With gradient_as_bucket_view, the next step writes into it; a bucket may have a single parameter."""
    with agent_of() as agent:
        catch_up = agent.internals.catch_up_for(agent.state.optimizer)
        assert catch_up is not None
        catch_up.begin_step()
        catch_up.machine.choose_action(lead(Tag(7, 3), names="ab"), Tag(0, 0))
        buckets = [torch.ones(parameter.numel()) for parameter in agent.state.model.parameters()]
        for parameter, bucket in zip(agent.state.model.parameters(), buckets, strict=True):
            parameter.grad = bucket.view(parameter.shape)
        catch_up.apply()
        for bucket in buckets:
            bucket.zero_()
        [kept] = catch_up.machine.kept_steps
        assert all(gradient is not None and gradient.all() for gradient in kept.content.gradients)


def test_who_is_refused_leaves_nothing_behind() -> None:
    before = sys.excepthook, {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigurationError):
        agent_of(counter=Counter())
    assert (sys.excepthook, {thread.name for thread in threading.enumerate()}) == before
