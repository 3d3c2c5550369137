"""Defects of a rank, as methods that take the place of its machine's own."""

from agent_client.step import Phase, StepMachine
from tests.simulation.museum.exhibit import Replaced


def _every_yes(self: StepMachine) -> bool:
    return self.phase is Phase.VOTED and self.failure is None


YES_OF_ONE_DECIDES = (Replaced(StepMachine, "has_decided", property(_every_yes)),)
