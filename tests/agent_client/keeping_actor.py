"""A rank that writes a checkpoint after every committed step."""

from typing import Any

from agent_client.training.checkpoint_folder import CheckpointFolder
from tests.agent_client.actors import AgentActor


class KeepingActor(AgentActor):
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
            self.checkpoints.wait()
        return told
