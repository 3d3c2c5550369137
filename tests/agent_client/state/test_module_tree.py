"""Whatever changes in a model is noticed once, and the look costs little."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agent_client.state.module_tree import ModuleTree


def model_of() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)]))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a layer is inserted": lambda model: model[1].insert(0, nn.Linear(2, 2)),
    "a layer is replaced": lambda model: model.__setitem__(0, nn.Linear(2, 2)),
    "a layer is removed": lambda model: model.__delitem__(0),
    "a leaf gets a child": lambda model: setattr(model[1][0], "adapter", nn.Linear(2, 1)),
    "a parameter is replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter is added": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))),
    "a parameter is assigned": lambda model: model.load_state_dict(
        {name: each.clone() for name, each in model.state_dict().items()}, assign=True
    ),
    "a parameter becomes another one": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed_once(change: str) -> None:
    model = model_of()
    tree = ModuleTree(model, "_parameters")
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
        parameter.requires_grad_(False)
    assert not tree.has_changed()
    CHANGES[change](model)
    assert tree.has_changed()
    assert not tree.has_changed()


def test_a_replaced_buffer_is_noticed_where_buffers_are_looked_at() -> None:
    model = model_of()
    buffers, parameters = ModuleTree(model, "_buffers"), ModuleTree(model, "_parameters")
    model[1][1].running_mean = torch.ones(2)
    assert (buffers.has_changed(), parameters.has_changed()) == (True, False)
    assert not buffers.has_changed()


def test_a_scripted_module_is_a_tree_too() -> None:
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    tree = ModuleTree(nn.Sequential(scripted), "_parameters")
    assert not tree.has_changed()
