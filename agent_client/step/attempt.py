"""One attempt at a step: the actions that may fail, and their time limit."""

import logging
import time
from collections.abc import Callable

from agent_client.collectives.peers import Peers
from agent_client.errors import AgentError, ModelMismatch, first_line
from agent_client.healing.connection import StateRefused
from agent_client.healing.healing import DoesNotFit
from agent_client.manager_client.client import ManagerConnection
from agent_client.step.config import AgentConfig
from agent_client.step.rules.machine import StepMachine

log = logging.getLogger(__name__)


class StepAttempt:
    """Runs actions of the current step. The first failure marks the step as failed."""

    def __init__(self, machine: StepMachine, manager: ManagerConnection, peers: Peers, config: AgentConfig) -> None:
        self._machine = machine
        self._manager = manager
        self._peers = peers
        self._config = config
        self.failed_at: float | None = None
        """When the current step failed, on the monotonic clock."""

    def run(self, what: str, act: Callable[[], object]) -> bool:
        """Call `act`. If it fails, mark the step as failed, abort it on the peers, and return False.

        Raises:
            ModelMismatch, AgentError: No later quorum can repair the failure. The manager receives a report before the
            peers notice.
        """
        try:
            act()
        except DoesNotFit as e:
            mismatch = ModelMismatch(
                f"the received state does not match the local one: {e.difference or first_line(e)}; this group's model "
                "or optimizer is not its peers': start it with theirs"
            )
            self._manager.report(f"ModelMismatch: {mismatch}", ends_group=True)
            raise mismatch from None
        except StateRefused as e:
            refused = AgentError(f"this group cannot heal: {e}")
            self._manager.report(f"{refused}", ends_group=True)
            raise refused from None
        except Exception as e:  # noqa: BLE001  the next quorum repairs any failure
            self.fail(what, first_line(e))
            return False
        return True

    def fail(self, what: str, reason: str) -> None:
        log.debug("step %d: %s failed: %s", self._machine.step, what, reason)
        self.failed_at = time.monotonic() if self.failed_at is None else self.failed_at
        self._machine.failed(f"{what}: {reason}")
        self._peers.drop()

    @property
    def limit_s(self) -> float:
        """Time limit of a collective or a vote. If a group heals, the others wait for it."""
        assignment = self._machine.assignment
        heals = assignment is not None and assignment.has_healing
        return self._config.timeout_s + (self._config.heal_timeout_s if heals else 0.0)
