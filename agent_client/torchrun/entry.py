"""Entry point of `torchrun --rdzv-backend lighthouse`.

torchrun imports this module at every start, even with another backend, so it imports everything else lazily.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    return create_handler


def create_handler(params: "RendezvousParameters") -> "RendezvousHandler":
    """Create the handler for `--rdzv-backend lighthouse`, and patch torchrun's agent to support it."""
    from agent_client.torchrun.elastic_agent import extend
    from agent_client.torchrun.handler import create

    handler = create(params)
    extend()
    return handler
