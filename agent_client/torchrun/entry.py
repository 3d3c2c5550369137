"""Entry point of `torchrun --rdzv-backend lighthouse`.

torchrun loads this module at every start, whatever its backend, so everything else is imported on first use.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    return create_handler


def create_handler(params: "RendezvousParameters") -> "RendezvousHandler":
    """Create the handler, and extend torchrun's agent for it."""
    from agent_client.torchrun.elastic_agent import extend
    from agent_client.torchrun.handler import create

    handler = create(params)
    extend()
    return handler
