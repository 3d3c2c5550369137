"""Requests the quorum of a step, and logs quorum changes."""

import logging
import time
from collections.abc import Sequence

from agent_client.errors import AgentError
from agent_client.healing.catch_up import CatchUpDriver
from agent_client.healing.healing import Healing
from agent_client.manager_client.client import ManagerConnection
from agent_client.step.config import AgentConfig
from agent_client.step.rules.machine import StepMachine
from agent_client.step.rules.news import Patience
from lighthouse_protocol.messages.membership import PLAIN, Assignment
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_runtime.process.children import ServerProcess

log = logging.getLogger(__name__)


class QuorumRequester:
    def __init__(
        self,
        machine: StepMachine,
        manager: ManagerConnection,
        healing: Healing,
        config: AgentConfig,
        manager_process: ServerProcess | None = None,
        catch_up: CatchUpDriver | None = None,
    ) -> None:
        self._machine = machine
        self._manager = manager
        self._healing = healing
        self._config = config
        self._manager_process = manager_process
        self._catch_up = catch_up
        self._patience = Patience(config.max_consecutive_discards)
        self.counts_at_once = True
        """True if a group that heals in a step also contributes to that step."""

    def request(self) -> Assignment | LighthouseError:
        """Request the quorum, and retry while the manager is unreachable.

        Returns:
            The assignment, or the error with which the manager refused the request. The next step then requests again.

        Raises:
            AgentError: The manager has exited, or no later request can succeed.
        """
        patience = self._patience
        while True:
            try:
                assignment = self._request_once()
                patience.answered()
                return assignment
            except LighthouseError as e:
                if reason := patience.refused(e, time.monotonic()):
                    raise AgentError(f"the manager at {self._manager.address} rejected this rank: {reason}") from e
                if self._manager_process is not None and not self._manager_process.is_alive:
                    raise AgentError("the group's manager ended; restart the group") from e
                is_alive = self._manager.check_alive(e)
                if news := patience.pop_news(e, time.monotonic()):
                    log.error("step %d: %s", self._machine.step, news)
                time.sleep(patience.backoff_s)
                if is_alive:
                    return e

    def _request_once(self) -> Assignment:
        """Request a quorum for this step.

        If the quorum was revoked in the meantime, and no other rank of the group can have begun the step, vote no to
        give the quorum up.
        """
        machine = self._machine
        while True:
            assignment = self._manager.ask(
                machine.step,
                self._healing.address,
                timeout_s=self._config.quorum_timeout_s,
                tag_quorum_id=machine.tag_quorum_id,
                commit_failures=machine.discards,
                catch_up=self._catch_up.request_fields() if self._catch_up is not None else PLAIN,
                distrust=machine.distrust,
                heals_first=machine.heals_first if self.counts_at_once else None,
            )
            if not machine.is_alone or self.find_revocation(assignment) is None:
                return assignment
            step, quorum_id = assignment.max_step, assignment.quorum_id
            self._manager.vote(step, False, quorum_id=quorum_id, timeout_s=self._config.timeout_s)
            machine.quorum_revoked()

    def find_revocation(self, assignment: Assignment) -> str | None:
        reason = self._manager.watch.revoked(assignment.quorum_id)
        if reason is None and assignment.revoked:
            reason = "reported with the quorum"
        return None if reason is None else f"quorum {assignment.quorum_id} was revoked: {reason}"


NAMES_LOGGED = 16


def log_quorum(before: Assignment | None, now: Assignment) -> None:
    """Log the quorum of `now`, with the groups that joined and were lost. Do nothing if `before` has the same one."""
    if before is not None and before.quorum_id == now.quorum_id:
        return
    known = frozenset(before.replica_ids if before is not None else now.replica_ids)
    admitted = [name for name in now.replica_ids if name not in known]
    gone = sorted(known - frozenset(now.replica_ids))
    log.info(
        "quorum %d: %d %s from step %d%s%s",
        now.quorum_id,
        now.replica_world_size,
        "group" if now.replica_world_size == 1 else "groups",
        now.max_step,
        f"; joined: {_join_names(admitted)}" if admitted else "",
        f"; without: {_join_names(gone)}" if gone else "",
    )


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - NAMES_LOGGED
    return ", ".join(names[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")
