"""A rank that is ahead serves the state of its step to the peers that heal.

Peers read the state in place. The source's next write waits until the readers have finished, up to `timeout_s`, or
until the quorum is revoked. Ranks without an assigned target also serve their state: they send parts of a large state,
and replace a source that fails.

A source serves a copy in two cases. If its state moves during the step (`TrainState.stands_still` is False), the copy
replaces the state until the next step. For a target that catches up, the source retains the copy after the step;
without memory for the copy, it refuses.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

from agent_client.healing.connection import StateKey
from agent_client.healing.memory import has_room
from agent_client.healing.server import StateServer
from agent_client.state.snapshot import size_bytes
from agent_client.state.train_state import TrainState
from lighthouse_protocol.messages.membership import Assignment, Tag
from lighthouse_runtime.net.address import listening_host

log = logging.getLogger(__name__)


class Share(Protocol):
    @property
    def divisor(self) -> int: ...


class StateOwner(Protocol):
    """The part of `StepMachine` that healing uses."""

    step: int
    tag_quorum_id: int | None
    batches_committed: int
    must_install: bool
    is_torn: bool

    @property
    def tag(self) -> Tag: ...

    @property
    def share(self) -> Share: ...

    def work_at(self, step: int, tag_quorum_id: int | None) -> None: ...

    def installing(self) -> None:
        """Mark the state as torn until `installed`, because it is being overwritten."""
        ...

    def installed(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None: ...


MAX_REASON_CHARS = 300


def key_of(assignment: Assignment, group_rank: int) -> StateKey:
    return StateKey(assignment.quorum_id, assignment.max_step, group_rank)


@dataclass(frozen=True, slots=True)
class _KeptCopy:
    targets: frozenset[str]  # replica_ids of the groups that this rank must serve
    until: float  # by time.monotonic()


class HealSource:
    """Offers the state of one rank. Only `cut_off` is thread-safe."""

    def __init__(self, state: TrainState, group_rank: int, host: str, timeout_s: float) -> None:
        self._state = state
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._server = StateServer(listening_host(host), advertise=host)
        self._is_read_in_place = False
        self._kept: dict[StateKey, _KeptCopy] = {}

    @property
    def address(self) -> str:
        return self._server.address

    def serve(self, assignment: Assignment, machine: StateOwner) -> None:
        """Offer this step's state if a participant heals. Call `release` for the last step first."""
        self._is_read_in_place = False
        self._forget_kept(assignment)
        beside = [target for target in assignment.serve_to if target in assignment.catching_up]
        is_source = len(beside) < len(assignment.serve_to)
        is_up_to_date = not (assignment.heals or machine.must_install or assignment.catches_up)
        offers = assignment.has_healing and is_up_to_date and (is_source or self._state.stands_still)
        if offers or beside:
            try:
                self._offer(assignment, machine, beside, offers=offers)
            except (TypeError, ValueError) as error:  # ends the healing group: a retry would not help
                self._server.withdraw()
                log.error("cannot send the state to the healing group: %s", error)
                self._server.refuse(
                    key_of(assignment, self._group_rank), str(error)[:MAX_REASON_CHARS], assignment.secret
                )
        if not offers:
            self._server.withdraw()
        self._server.settle(assignment.quorum_id, assignment.max_step)

    def withdraw(self) -> None:
        self._server.withdraw()

    def release(self, *, is_committed: bool) -> None:
        """Wait until no peer reads the state in place. After a discarded step, end the readers at once."""
        if self._is_read_in_place:
            self._server.withdraw(self._timeout_s if is_committed else 0.0)
            self._is_read_in_place = False

    def cut_off(self) -> None:
        self._server.cut_off()

    def close(self) -> None:
        self._server.close()

    def _offer(self, assignment: Assignment, machine: StateOwner, beside: list[int], *, offers: bool) -> None:
        agent = {
            "step": machine.step,
            "tag_quorum_id": machine.tag_quorum_id,
            "batches_committed": machine.batches_committed,
        }
        train = self._state.in_place()
        keeps = bool(beside) and has_room(size_bytes(train))
        copies = keeps or (offers and not self._state.stands_still)
        state = {"train": self._state.snapshot() if copies else train, "agent": agent}
        if keeps:
            self._keep(assignment, state, beside)
        elif beside:
            log.warning("no memory for a copy of the state: a group that catches up must use another source, or block")
        if offers:
            self._server.publish(key_of(assignment, self._group_rank), state, assignment.secret)
            self._is_read_in_place = not copies

    def _keep(self, assignment: Assignment, state: dict[str, Any], targets: list[int]) -> None:
        names = frozenset(assignment.replica_ids[target] for target in targets)
        for key in [key for key, kept in self._kept.items() if kept.targets & names]:
            self._forget(key)
        key = key_of(assignment, self._group_rank)
        self._server.keep(key, state, len(targets), assignment.secret)
        self._kept[key] = _KeptCopy(names, time.monotonic() + self._timeout_s)

    def _forget_kept(self, assignment: Assignment) -> None:
        if self._kept:
            catching_up = {assignment.replica_ids[rank] for rank in assignment.catching_up}
            for key, kept in list(self._kept.items()):
                if not kept.targets & catching_up or time.monotonic() >= kept.until:
                    self._forget(key)

    def _forget(self, key: StateKey) -> None:
        del self._kept[key]
        self._server.forget(key)
