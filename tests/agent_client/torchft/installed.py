"""The same training, moved."""

from agent_client.torchft import install
from tests.agent_client.torchft.trainers import Trainer

install()

__all__ = ["Trainer"]
