"""What torch.compile leaves alone, and what a traceback through it shows."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agent_client.collectives.observed import never_compiled, not_itself_compiled

Leave = Callable[[Callable[..., Any]], Callable[..., Any]]

eager = pytest.mark.parametrize("leave_alone", [never_compiled, not_itself_compiled])


@eager
def test_an_error_shows_no_frames_of_torch(leave_alone: Leave):
    @leave_alone
    def inner():
        raise ValueError("the script's")

    @leave_alone
    def outer():
        inner()

    with pytest.raises(ValueError, match="the script's") as caught:
        outer()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames if frame.name != "call"][1:] == ["outer", "inner"]
    assert not [frame.filename for frame in frames if "torch" in frame.filename.split("site-packages")[-1]]


@eager
def test_the_code_around_it_is_compiled_and_it_is_not(leave_alone: Leave):
    compiled: list[bool] = []
    graphs: list[torch.fx.GraphModule] = []

    @leave_alone
    def step(x: torch.Tensor) -> torch.Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda x: step(x * 2) * 3, backend=backend)
    for _ in range(2):
        assert run(torch.ones(2)).tolist() == [9, 9]
    assert compiled == [False, False]
    assert len(graphs) == 2
