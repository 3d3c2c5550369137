"""What torchtitan's optimizers serve to a group that heals."""

from types import SimpleNamespace
from typing import Any

import torch

from agent_client.integrations.torchtitan import serving_present


def test_an_optimizer_is_served_with_its_present_learning_rate() -> None:
    """torchtitan keeps a dictionary that it has made when the optimizer was built."""
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight], lr=0.1)
    kept: dict[str, Any] = {"state.w.exp_avg": torch.zeros(2), "param_groups.w.lr": 0.0, "param_groups.w.gone": 7}
    container = SimpleNamespace(optimizers=[adam])
    serve = serving_present(lambda _: kept)
    assert serve(container)["param_groups.w.lr"] == 0.1
    adam.param_groups[0]["lr"] = 0.05
    served = serve(container)
    assert served == kept | {"param_groups.w.lr": 0.05}
    assert served["state.w.exp_avg"] is kept["state.w.exp_avg"]
