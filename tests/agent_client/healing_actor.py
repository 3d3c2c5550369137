"""A rank whose state takes several pieces to send, and which can be made to fail while it sends them."""

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

from agent_client.state.encoding import Encoding
from agent_client.training.checkpoint_folder import CheckpointFolder
from agent_client.transfer import gloo_transport
from tests.agent_client.actors import AgentActor

CHUNK_BYTES = 2**18
NUMBERS = 2 * 2**20


class Ballast:
    """8 MiB that heal along, of which no step takes notice."""

    def __init__(self, seed: int) -> None:
        self.numbers = torch.full((NUMBERS,), float(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.numbers.copy_(state_dict["numbers"])


class HealingActor(AgentActor):
    def build(self, manager: str, *, seed: int = 0, **options: Any) -> None:
        super().build(manager, seed=seed, **options)
        self.ballast = Ballast(seed)
        self.agent.state.standing["ballast"] = self.ballast
        healing: Any = self.agent._healing
        healing._source._server._chunk_bytes = CHUNK_BYTES

    def get_ballast(self) -> set[float]:
        return set(self.ballast.numbers.unique().tolist())

    def set_ballast(self, value: float) -> None:
        self.ballast.numbers.fill_(value)

    def stop_while_sending(self) -> None:
        """This process is stopped in the middle of the next transfer from here."""

        def chunks(encoding: Encoding, start: int, real: Any = Encoding.chunks) -> Iterator[memoryview]:
            for place, chunk in enumerate(real(encoding, start)):
                if place == 3:
                    os.kill(os.getpid(), signal.SIGSTOP)
                yield chunk

        Encoding.chunks = chunks

    def break_groups(self) -> None:
        """What this rank sends over process groups breaks off after the second message."""

        def two(encoding: Encoding, real: Any = gloo_transport.messages) -> Iterator[torch.Tensor]:
            return itertools.islice(real(encoding), 2)

        gloo_transport.messages = two


class KeepingActor(AgentActor):
    """Writes a checkpoint after every committed step."""

    def build(self, manager: str, *, folder: str, **options: Any) -> None:
        super().build(manager, **options)
        self.checkpoints = CheckpointFolder(folder, self.agent)

    def resume(self) -> tuple[bool, int, str]:
        """(whether there was one, the step, the hash of the weights) afterwards."""
        return self.checkpoints.resume(), self.agent.current_step, self.hash()

    def step(self, **options: Any) -> dict[str, Any]:
        told = super().step(**options)
        if told["committed"]:
            self.checkpoints.save()
        return told
