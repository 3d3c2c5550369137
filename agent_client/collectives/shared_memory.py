"""What a process and a child of its fork server share: memory, and the limit of a message."""

import mmap
import os

import torch

MAX_MESSAGE_BYTES = 65536


def mapped(descriptor: int) -> torch.Tensor:
    """The memory behind `descriptor`, which is closed, as bytes; unmapped with the last tensor that shows it."""
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
