"""What `torchrun --rdzv-backend lighthouse` finds, by the entry point of that name. torchrun loads it at every start,
whatever its backend, so nothing else is imported before it is asked for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    return create_handler


def create_handler(params: "RendezvousParameters") -> "RendezvousHandler":
    """Raises ValueError that names the option."""
    from agent_client.torchrun.elastic_agent import extend
    from agent_client.torchrun.handler import create

    handler = create(params)
    extend()
    return handler
