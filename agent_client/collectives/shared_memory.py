"""Memory that a process and a child of its fork server share, and the size limit of their messages.

Both isolated.py and fork_server.py use it.
"""

import mmap
import os

import torch

MAX_MESSAGE_BYTES = 65536


def mapped(descriptor: int) -> torch.Tensor:
    """Map the memory behind `descriptor` and close the descriptor.

    Returns:
        The memory as uint8. It is unmapped with the last tensor that uses it.
    """
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
