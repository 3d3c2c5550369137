"""The side that is behind: this rank receives the state of a peer, checks it and installs it.

Over HTTP all sources give a part of a large state, every one can stand in for another, and a transfer that broke is
resumed. The process group is used first where it was chosen; if it fails, HTTP follows.

A target that catches up fetches over HTTP on a thread of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from agent_client.healing.heal_log import logged
from agent_client.healing.source import key_of
from agent_client.healing.state_owner import StateOwner
from agent_client.progress.heal_mark import HealMark
from agent_client.state.decoding import CorruptState, Encoding, encode
from agent_client.state.snapshot import StateMismatch, size_bytes
from agent_client.state.train_state import TrainState
from agent_client.transfer.arriving import Arriving
from agent_client.transfer.fetch import Fetch, FindAddress, OnBytes, OtherTargets
from agent_client.transfer.gloo_transport import GroupTransport
from agent_client.transfer.memory import available_bytes
from agent_client.transfer.response import StateUnavailable
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_runtime.client.manager import ManagerClient

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
SILENCE_SHARE = 0.1
"""Of the heal timeout a source may be silent while there is another."""

Sources = dict[str, FindAddress]
"""By the name of a source, what finds the address at which it serves its state."""

OnReceived = Callable[[float, int], None]
OnBegun = Callable[[str, int], HealMark]
"""Makes the mark of a heal from that source, of that step."""


HandOn = Callable[[Assignment, Arriving], None]
"""Offers the others that heal what arrives here."""


def unread_mark(source: str, step: int) -> HealMark:
    """For a target whose progress no one asks for."""
    return HealMark(1, source, step, time.monotonic)


class DoesNotFit(StateMismatch):
    """The state is what was asked for, and this rank's model or optimizer is another: no later one will fit either."""


@contextmanager
def _unfit() -> Generator[None]:
    """A mismatch in the block is one that no later state repairs."""
    try:
        yield
    except StateMismatch as error:
        raise DoesNotFit(f"{error}", error.difference) from None


class HealTarget:
    """`groups`: where the state travels over process groups first. `revoke` is for any thread, all else for the step's
    own. `on_received` is called with the seconds that a state took to arrive, and the bytes of its tensors. The mark
    that `on_begun` makes is told of what arrives."""

    def __init__(
        self,
        state: TrainState,
        group_rank: int,
        timeout_s: float,
        groups: GroupTransport | None,
        on_received: OnReceived = lambda seconds, nbytes: None,
        on_begun: OnBegun = unread_mark,
    ) -> None:
        self._state = state
        self._on_begun = on_begun
        self._on_received = on_received
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._groups = groups
        self._received: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._quorum_id = 0
        """Of `_fetch`."""
        self._revoked_id = 0

    def fetch(self, assignment: Assignment, hand_on: HandOn | None = None) -> None:
        """Receive a peer's state, if this rank heals; with `hand_on` it is shared out with the others that do. Raises
        what says why it cannot be had."""
        self._received = None
        if not assignment.heals:
            return
        sources = self._sources(assignment)
        began_at, mark = time.monotonic(), self._on_begun(next(iter(sources)), assignment.max_step)
        with logged(mark):
            received = self._fetch_over_group(assignment, mark.received)
            received = received or self._begin(assignment, sources, mark.received, hand_on).run()
        self._received = received
        self._on_received(time.monotonic() - began_at, size_bytes(received["train"]))

    def install(self, machine: StateOwner) -> None:
        """Take over what was received, if anything."""
        received, self._received = self._received, None
        if received is None:
            return
        agent = received["agent"]
        machine.installing()
        self._state.install(received["train"])
        machine.installed(agent["step"], agent["tag_quorum_id"], agent["batches_committed"])

    def fetch_beside(self, assignment: Assignment) -> "BackgroundFetch":
        """Begin to receive the state of the source that this rank is dealt, while its steps go on."""
        name, find = next(iter(self._sources(assignment).items()))
        mark = self._on_begun(name, assignment.max_step)
        fetch = self._new_fetch(assignment, {name: find}, mark.received, gives_way=True)
        return BackgroundFetch(fetch, mark, self._on_received)

    def revoke(self, quorum_id: int, reason: str) -> None:
        """End a transfer of that quorum or of an earlier one, and begin no other."""
        with self._lock:
            self._revoked_id = max(self._revoked_id, quorum_id)
            fetch = self._fetch if self._quorum_id <= quorum_id else None
        if fetch is not None:
            fetch.cancel(reason)

    def _fetch_over_group(self, assignment: Assignment, told: OnBytes) -> dict[str, Any] | None:
        """None: not by this way."""
        if self._groups is None:
            return None
        try:
            received = self._groups.receive(assignment, max_bytes=available_bytes(), on_received=told)
            self._check(assignment, received)
        except (RuntimeError, CorruptState, StateMismatch) as error:
            log.warning("cannot receive the state over the process group: %s", error)
            return None
        return received

    def _begin(self, assignment: Assignment, sources: Sources, told: OnBytes, hand_on: HandOn | None) -> Fetch:
        with self._lock:
            if assignment.quorum_id <= self._revoked_id:
                raise StateUnavailable(f"quorum {assignment.quorum_id} was revoked")
            others = hand_on and self._others(assignment, hand_on)
            self._fetch, self._quorum_id = self._new_fetch(assignment, sources, told, others), assignment.quorum_id
            return self._fetch

    def _new_fetch(
        self,
        assignment: Assignment,
        sources: Sources,
        told: OnBytes,
        others: OtherTargets | None = None,
        *,
        gives_way: bool = False,
    ) -> Fetch:
        return Fetch(
            sources,
            key_of(assignment, self._group_rank),
            self._timeout_s,
            secret=assignment.secret,
            accept=lambda received: self._check(assignment, received),
            expect=self._check_layout,
            silence_s=self._timeout_s * SILENCE_SHARE,
            max_bytes=available_bytes(),
            gives_way=gives_way,
            on_received=told,
            others=others,
            own=self._own(assignment),
        )

    def _own(self, assignment: Assignment) -> Encoding | None:
        """Before the first step all groups may have loaded the same weights."""
        return None if assignment.max_step else encode({"train": self._state.in_place(), "agent": {}})

    def _others(self, assignment: Assignment, hand_on: HandOn) -> OtherTargets:
        managers = assignment.shares_with
        names = [f"the target at {manager}" if manager else "" for manager in managers]
        finds = {name: self._finds(assignment, at) for name, at in zip(names, managers, strict=True) if name}
        return OtherTargets(names, finds, lambda state: hand_on(assignment, state))

    def _sources(self, assignment: Assignment) -> Sources:
        named = {assignment.replica_ids[assignment.heal_from_rank or 0]: assignment.heal_from_address}
        named |= {f"the group at {manager}": manager for manager in assignment.other_sources}
        return {name: self._finds(assignment, manager) for name, manager in named.items()}

    def _finds(self, assignment: Assignment, manager: str) -> FindAddress:
        return lambda: self._ask(assignment, manager)

    def _ask(self, assignment: Assignment, manager: str) -> str:
        """Where this rank's counterpart in that group serves its state."""
        with ManagerClient(manager) as client:
            return client.checkpoint_address(
                self._group_rank,
                quorum_id=assignment.quorum_id,
                secret=assignment.secret,
                timeout_s=min(ASK_TIMEOUT_S, self._timeout_s),
            )

    def _check(self, assignment: Assignment, received: object) -> None:
        match received:
            case {
                "train": dict() as train,
                "agent": {"step": int() as step, "tag_quorum_id": int() as tag, "batches_committed": int()},
            } if 0 <= tag <= assignment.quorum_id:
                if step != assignment.max_step:
                    raise StateMismatch(f"it is of step {step}, not {assignment.max_step}")
                if assignment.tag_quorum_id not in (None, tag):
                    raise StateMismatch(f"quorum {tag} has committed it, not {assignment.tag_quorum_id}")
                with _unfit():
                    self._state.check(train)
            case _:
                raise StateMismatch("it is not what an Agent serves, or of another quorum's future")

    def _check_layout(self, announced: object) -> None:
        """Before the first tensor crosses: a state of another model ends this group at once, however large it is."""
        if isinstance(announced, dict) and isinstance(train := announced.get("train"), dict):
            with _unfit():
                self._state.check_layout(train)


class BackgroundFetch:
    """A transfer on a thread of its own. What it brings, or why it fails, is in `received` when it is done."""

    def __init__(self, fetch: Fetch, mark: HealMark, on_received: OnReceived = lambda seconds, nbytes: None) -> None:
        self._fetch = fetch
        self._mark = mark
        self._on_received = on_received
        self.received: Future[Any] = Future()
        threading.Thread(target=self._run, name="lighthouse catch-up", daemon=True).start()

    def cancel(self, reason: str) -> None:
        self._fetch.cancel(reason)

    def _run(self) -> None:
        began_at = time.monotonic()
        try:
            with logged(self._mark, is_beside=True):
                received = self._fetch.run()
            self._on_received(time.monotonic() - began_at, size_bytes(received["train"]))
            self.received.set_result(received)
        except Exception as e:  # noqa: BLE001  it belongs to the CatchUpDriver, which polls `received`
            self.received.set_exception(e)
