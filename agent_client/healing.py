"""One rank's side of healing: serve the state of a step to those that need it; take a peer's over."""

import logging
from typing import Any

from agent_client.checkpoint.http import CheckpointServer, fetch
from agent_client.step import StepMachine
from agent_client.train_state import TrainState
from lighthouse_runtime.clients import ManagerClient
from protos.membership import Assignment

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0


class Healing:
    """A source serves a copy, so its training waits for no transfer; a target installs what it got before its vote."""

    def __init__(self, state: TrainState, group_rank: int, host: str, timeout_s: float) -> None:
        self._state = state
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._server = CheckpointServer(advertise=host)
        self._received: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        return self._server.address

    def serve(self, assignment: Assignment, machine: StepMachine) -> None:
        """Publish this step's state if a participant heals from it. What the last step published has been read."""
        if not assignment.serve_to:
            return self._server.withdraw()
        agent = {
            "step": machine.step,
            "tag_quorum_id": machine.tag_quorum_id,
            "batches_committed": machine.batches_committed,
        }
        return self._server.publish(self._key(assignment), {"train": self._state.snapshot(), "agent": agent})

    def fetch(self, assignment: Assignment) -> None:
        """Receive the assigned peer's state, if this rank heals. Raises what says why it cannot be had."""
        self._received = None
        if not assignment.heals:
            return
        source = assignment.replica_ids[assignment.heal_from_rank or 0]
        log.info("healing from %s to step %d", source, assignment.max_step)
        with ManagerClient(assignment.heal_from_address) as manager:
            address = manager.checkpoint_address(self._group_rank, timeout_s=min(ASK_TIMEOUT_S, self._timeout_s))
        self._received = fetch(address, self._key(assignment), self._timeout_s)

    def install(self, assignment: Assignment, machine: StepMachine) -> None:
        """Take over what was received, if anything. Raises before it changes anything if that does not fit."""
        received, self._received = self._received, None
        if received is None:
            return
        agent = received["agent"]
        if agent["step"] != assignment.max_step:
            raise ValueError(f"the state received is of step {agent['step']}, not {assignment.max_step}")
        self._state.check(received["train"])
        machine.installing()
        self._state.install(received["train"])
        machine.installed(agent["step"], agent["tag_quorum_id"], agent["batches_committed"])

    def close(self) -> None:
        self._server.close()

    def _key(self, assignment: Assignment) -> tuple[int, int, int]:
        return (assignment.quorum_id, assignment.max_step, self._group_rank)
