"""What the HSDP example does beside its training, which test_train_scripts.py runs."""

import runpy

import pytest
import torch
from torch import distributed
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.daemons import ROOT


def test_looking_at_the_shards_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """full_tensor() is ALLGATHER_COALESCED to torch's gloo. That name is too long to lie in its std::string itself, and
    two threads of a group assign such names without a lock (ProcessGroupGloo::runLoop, 2.13): both free it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = runpy.run_path(str(ROOT / "examples/train_hsdp.py"))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = example["sharded_reader"]()
        adam = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 64)).sum().backward()
        adam.step()
        with CommDebugMode() as communication:
            found = list(example["shards"](model, adam))
    finally:
        distributed.destroy_process_group()
    assert len(found) == 4 * len(list(model.parameters()))
    assert communication.get_total_counts() == 0
