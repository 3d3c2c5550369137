"""torchtitan on CPUs, by our module: titan_script.py ARGUMENTS... After each step each rank writes to $EVENTS what it
holds.

torchtitan asks the accelerator for its name and its memory, and has FSDP scale sums in a way that gloo lacks."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils as devices
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def be_an_accelerator() -> None:
    cpu: Any = torch.cpu
    devices._get_available_device_type = lambda: "cpu"
    devices._get_device_module = lambda _: cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
    cpu.memory_stats = lambda *_: {}
    cpu.current_device = lambda *_: 0
    cpu.set_device = cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None


def sum_by_gloo() -> None:
    from torchtitan.models.llama3.infra import parallelize

    divide = parallelize.disable_fsdp_gradient_division

    def without_premultiplied_sums(model: torch.nn.Module) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = without_premultiplied_sums


def digest(tensors: Any) -> str:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in local)).hexdigest()


def tell_each_step() -> None:
    from torchtitan.components.checkpoint import CheckpointManager

    save, events = CheckpointManager.save, Path(os.path.expandvars(os.environ["EVENTS"]))

    def save_and_tell(self: Any, curr_step: int, last_step: bool = False) -> None:
        save(self, curr_step, last_step)
        [model], [optimizer] = self.states["model"].model, self.states["optimizer"].optimizers
        states = [each for parameter in model.parameters() for each in optimizer.state[parameter].values()]
        event = {
            "step": self.ft_manager.current_step(),
            "participants": self.ft_manager.num_participants(),
            "rate": optimizer.param_groups[0]["lr"],
            "hash": [digest(each) for each in (model.parameters(), states, model.buffers())],
        }
        with events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    CheckpointManager.save = save_and_tell


if __name__ == "__main__":
    torch.set_num_threads(1)
    be_an_accelerator()
    sum_by_gloo()
    tell_each_step()
    from agent_client.integrations.torchtitan import main

    main()
