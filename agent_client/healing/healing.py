"""One rank's side of healing: a source (source.py), a target (target.py), and the quorum that both belong to.

A target fetches and installs before it computes anything in the step. So when a source has completed a collective over
all participants, every target has received the state, from here or from another source, or has failed. Nothing is
written before that, and a state that is up to date can be read in place until the vote. Only a target that catches up
is waited for by no other group.
"""

from agent_client.healing.rules.modes import HealTransport, StateServing
from agent_client.healing.source import HealSource
from agent_client.healing.state_owner import StateOwner
from agent_client.healing.target import (
    SILENCE_SHARE,
    BackgroundFetch,
    HealTarget,
    OnBegun,
    OnReceived,
    unread_mark,
)
from agent_client.state.train_state import TrainState
from agent_client.transfer.gloo_transport import GroupTransport
from lighthouse_protocol.messages.membership import Assignment


class Healing:
    """`revoke` is for any thread, all else for the step's own. `timeout_s` bounds a transfer. `on_received` and
    `on_begun` as in HealTarget."""

    def __init__(
        self,
        state: TrainState,
        group_rank: int,
        host: str,
        timeout_s: float,
        *,
        state_serving: StateServing = StateServing.AUTO,
        transport: HealTransport = HealTransport.HTTP,
        on_received: OnReceived = lambda seconds, nbytes: None,
        on_begun: OnBegun = unread_mark,
    ) -> None:
        self._groups = None
        if transport is HealTransport.PROCESS_GROUP:
            self._groups = GroupTransport(group_rank, host, timeout_s * SILENCE_SHARE)
        self._source = HealSource(state, group_rank, host, timeout_s, state_serving, self._groups)
        self._target = HealTarget(state, group_rank, timeout_s, self._groups, on_received, on_begun)
        self._quorum_id = 0

    @property
    def address(self) -> str:
        """Where this rank serves its state."""
        return self._source.address

    def serve(self, assignment: Assignment, machine: StateOwner) -> None:
        """Offer this step's state if a participant heals."""
        self._quorum_id = assignment.quorum_id
        self._source.serve(assignment, machine)

    def withdraw(self) -> None:
        """There is no state to offer."""
        self._source.withdraw()

    def release(self, *, is_committed: bool) -> None:
        """The state may be written when this returns."""
        self._source.release(is_committed=is_committed)

    def fetch(self, assignment: Assignment) -> None:
        """Receive a peer's state, if this rank heals. Raises what says why it cannot be had."""
        self._quorum_id = assignment.quorum_id
        try:
            self._target.fetch(assignment, self._source.hand_on if self._source.hands_on else None)
        finally:
            if self._source.hands_on:
                self._source.settle(assignment)

    def install(self, machine: StateOwner) -> None:
        """Take over what was received, if anything."""
        self._target.install(machine)

    def fetch_beside(self, assignment: Assignment) -> BackgroundFetch:
        """Begin to receive the state of the source that this rank is dealt, while its steps go on."""
        return self._target.fetch_beside(assignment)

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End the transfers of that quorum, or of any so far, in both directions."""
        ended = self._quorum_id if quorum_id is None else quorum_id
        self._target.revoke(ended, reason)
        if ended >= self._quorum_id:
            self._source.cut_off()
            if self._groups is not None:
                self._groups.cancel(ended)

    def close(self) -> None:
        self.revoke(None, "the Agent was closed")
        self._source.close()
