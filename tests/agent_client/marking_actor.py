"""A rank that says where it is while it trains, and stands still in a phase when a test says so."""

import threading

from tests.agent_client.actors import AgentActor

BATCHES = 3


class MarkingActor(AgentActor):
    may_validate = threading.Event()

    def train(self) -> None:
        """Steps, each with a validation before it, for as long as the process lives. It stands still after the first
        batch of one: a hold that comes later waits for the next."""
        self.may_validate.set()
        while True:
            with self.agent.phase("validation", total=BATCHES):
                for batch in range(BATCHES):
                    self.agent.tick()
                    if batch == 0:
                        self.may_validate.wait()
            self.step()

    def hold(self) -> None:
        self.may_validate.clear()

    def release(self) -> None:
        self.may_validate.set()
