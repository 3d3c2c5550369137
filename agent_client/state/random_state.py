"""States of the default random number generators of Python, NumPy and torch."""

import random
import sys
from typing import Any

import torch

from agent_client.state.tree import State


def random_state() -> dict[str, State]:
    """Return a copy of the states of the default random number generators of Python, NumPy and torch."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy: Any = numpy.random.get_state() if numpy else ("", b"")
    name, keys, *rest = of_numpy
    is_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": (keys.tobytes(), *map(float, rest)) if name == "MT19937" else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if is_cuda else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy: Any = sys.modules.get("numpy")
    if numpy and state["numpy"] is not None:
        keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state(
            ("MT19937", numpy.frombuffer(keys, dtype=numpy.uint32), int(position), int(has_gauss), gauss)
        )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
