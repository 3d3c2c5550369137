"""A snapshot shares nothing; a state that does not fit is refused before anything is installed."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given

from agent_client.state.snapshot import StateMismatch, install_matches, snapshot
from tests.agent_client.state.trees import same, trees

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class TestSnapshot:
    @given(trees)
    def test_is_the_same_state(self, state: Any) -> None:
        assert same(snapshot(state), state)

    def test_shares_nothing_with_its_original(self) -> None:
        state = {"w": torch.zeros(3), "s": [torch.zeros(2)[:1]], "o": OrderedDict(a=[1])}
        copy = snapshot(state)
        state["w"].fill_(1)
        state["s"][0].fill_(1)
        state["s"].append(2)
        state["o"]["a"].append(2)
        assert same(copy, {"w": torch.zeros(3), "s": [torch.zeros(1)], "o": OrderedDict(a=[1])})

    def test_keeps_no_more_memory_than_the_tensor_has(self) -> None:
        assert snapshot(torch.zeros(1000)[:2]).untyped_storage().nbytes() == 8

    def test_is_detached_from_the_graph(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        copy = snapshot([weight, weight * 2])
        assert [(type(part), part.requires_grad, part.grad_fn) for part in copy] == [(torch.Tensor, False, None)] * 2

    def test_refuses_what_cannot_be_sent(self) -> None:
        with pytest.raises(TypeError, match=r"state\['hooks'\]\[0\]"):
            snapshot({"hooks": [print]})


def training_state(steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps, "seen": [1] * steps}


class TestInstallMatches:
    @given(trees)
    def test_a_state_fits_itself(self, state: Any) -> None:
        install_matches(state, snapshot(state))

    def test_other_values_fit(self) -> None:
        install_matches(training_state(steps=1), training_state(steps=3))
        install_matches({"lr": 1, "best": 2.0, "name": "x"}, {"lr": 0.5, "best": None, "name": "y"})

    def test_a_fresh_optimizer_takes_the_state_of_one_that_has_stepped(self) -> None:
        install_matches(training_state(steps=0), training_state(steps=2))
        install_matches({"momentum": None}, {"momentum": torch.zeros(2)})

    @pytest.mark.parametrize(
        ("expected", "received", "line"),
        [
            ({"a": 1, "b": 2}, {"a": 1}, "state['b']: missing in what was received"),
            ({"a": 1}, {"a": 1, 7: 2}, "state[7]: received, but unknown here"),
            ([torch.zeros(2, 3)], [torch.zeros(3, 2)], "state[0]: shape (2, 3) here, (3, 2) received"),
            ([torch.zeros(2)], [torch.zeros(2).half()], "state[0]: torch.float32 here, torch.float16 received"),
            ([torch.zeros(2)], [torch.zeros(2), 1], "state: 1 elements here, 2 received"),
            ({"lr": 0.1}, {"lr": torch.tensor(0.1)}, "state['lr']: value here, tensor received"),
            ({"w": torch.zeros(1)}, {"w": None}, "state['w']: tensor here, value received"),
            ({"w": [1]}, {"w": {"a": 1}}, "state['w']: sequence here, dict received"),
        ],
    )
    def test_names_what_does_not_fit(self, expected: Any, received: Any, line: str) -> None:
        with pytest.raises(StateMismatch) as caught:
            install_matches(expected, received)
        assert [shown.strip() for shown in str(caught.value).splitlines()[1:-1]] == [line]

    def test_names_at_most_ten(self) -> None:
        with pytest.raises(StateMismatch) as caught:
            install_matches(dict.fromkeys(range(25), 1), {"other": 1})
        lines = str(caught.value).splitlines()
        assert len(lines) == 1 + 10 + 1 + 1
        assert "and 16 more" in lines[-2]
