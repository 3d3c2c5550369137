"""One rank's side of healing: serve the state of a step to those that need it; take a peer's over.

A target fetches and installs before it computes anything in the step. So when a source has completed a collective over
all participants, every target has got the state, from here or from another, or has failed; nothing is written before
that, and what is up to date can be read in place until the vote. A source that was dealt a target serves a copy all the
same where memory allows ("snapshot"): its optimizer then waits for no reader. Otherwise ("hold") its write waits until
none is left, at most `timeout_s`, or until the quorum is revoked. All others that are up to date stand in for a source
that fails, and are read in place.

Over HTTP every source can stand in for another, and a broken transfer goes on. Over the process group it is what the
collectives' network can do; where that fails, HTTP follows.

A target that catches up is waited for by nobody: it fetches over HTTP on a thread of its own, from a copy that its
source keeps beyond its step. Without room for one the source refuses.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agent_client.healing.rules.modes import HealTransport, StateServing
from agent_client.healing.state_owner import StateOwner
from agent_client.state.decoding import CorruptState, encode
from agent_client.state.snapshot import StateMismatch, size_bytes
from agent_client.state.train_state import TrainState
from agent_client.transfer.fetch import Fetch
from agent_client.transfer.gloo_transport import GroupTransport
from agent_client.transfer.memory import available_bytes
from agent_client.transfer.server import CheckpointServer, StateUnavailable
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_runtime.client.manager import ManagerClient

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
SILENCE_SHARE = 0.1
"""Of the heal timeout a source may be silent while there is another."""
ROOM_FOR_A_COPY = 2.0
"""Times its size must be free before a state is copied."""


class DoesNotFit(StateMismatch):
    """The state is what was asked for, and this rank's model or optimizer is another: no later one will fit either."""


@contextmanager
def _unfit() -> Generator[None]:
    """A mismatch in here is one that no later state mends."""
    try:
        yield
    except StateMismatch as error:
        raise DoesNotFit(f"{error}", error.difference) from None


class Healing:
    """serve, fetch and install belong to the step's own thread; revoke is for any."""

    def __init__(
        self,
        state: TrainState,
        group_rank: int,
        host: str,
        timeout_s: float,
        *,
        state_serving: StateServing = StateServing.AUTO,
        transport: HealTransport = HealTransport.HTTP,
    ) -> None:
        self._state = state
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._mode = state_serving
        self._server = CheckpointServer(advertise=host)
        self._groups = None
        if transport is HealTransport.PROCESS_GROUP:
            self._groups = GroupTransport(group_rank, host, timeout_s * SILENCE_SHARE)
        self._received: dict[str, Any] | None = None
        self._is_read_in_place = False
        self._kept: dict[tuple[int, int, int], _Kept] = {}
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._quorum_id = self._revoked_id = 0

    @property
    def address(self) -> str:
        return self._server.address

    def serve(self, assignment: Assignment, machine: StateOwner) -> None:
        """Offer this step's state if a participant heals. What the last step offered has been read."""
        self._is_read_in_place = False
        self._quorum_id = assignment.quorum_id
        self._forget_kept(assignment)
        beside = [target for target in assignment.serve_to if target in assignment.catching_up]
        is_source = len(beside) < len(assignment.serve_to)
        is_up_to_date = not (assignment.heals or machine.must_install or assignment.catches_up)
        offers = assignment.has_healing and is_up_to_date and (is_source or self._state.stands_still)
        if offers or beside:
            self._offer(assignment, machine, beside, offers=offers, is_source=is_source)
        if not offers:
            self._server.withdraw()
        self._server.settle(assignment.quorum_id, assignment.max_step)

    def _offer(
        self, assignment: Assignment, machine: StateOwner, beside: list[int], *, offers: bool, is_source: bool
    ) -> None:
        agent = {
            "step": machine.step,
            "tag_quorum_id": machine.tag_quorum_id,
            "batches_committed": machine.batches_committed,
        }
        train = self._state.in_place()
        keeps = bool(beside) and has_room(size_bytes(train))
        copies = keeps or (is_source and self._copies(train))
        state = {"train": self._state.snapshot() if copies else train, "agent": agent}
        if keeps:
            self._keep(assignment, state, beside)
        elif beside:
            log.warning("no room for a copy of the state: who catches up has to heal from another group, or plainly")
        if offers:
            self._server.publish(self._key(assignment), state)
            self._is_read_in_place = not copies
        if self._groups is not None and is_source:
            self._groups.send(assignment, encode(state))

    def withdraw(self) -> None:
        """There is no state to offer."""
        self._server.withdraw()

    def release(self, *, is_committed: bool) -> None:
        """The state may be written when this returns."""
        if self._is_read_in_place:
            self._server.withdraw(self._timeout_s if is_committed else 0.0)
            self._is_read_in_place = False

    def fetch(self, assignment: Assignment) -> None:
        """Receive a peer's state, if this rank heals. Raises what says why it cannot be had."""
        self._received = None
        if not assignment.heals:
            return
        sources = self._sources(assignment)
        log.info("healing from %s to step %d", next(iter(sources)), assignment.max_step)
        self._received = self._fetch_over_group(assignment) or self._begin(assignment, sources).run()

    def install(self, assignment: Assignment, machine: StateOwner) -> None:
        """Take over what was received, if anything."""
        received, self._received = self._received, None
        if received is None:
            return
        agent = received["agent"]
        machine.installing()
        self._state.install(received["train"])
        machine.installed(agent["step"], agent["tag_quorum_id"], agent["batches_committed"])

    def fetch_beside(self, assignment: Assignment) -> "Beside":
        """Receive the state of the source that this rank is dealt, while its steps go on."""
        name, find = next(iter(self._sources(assignment).items()))
        log.info("catching up from %s at step %d", name, assignment.max_step)
        return Beside(self._new_fetch(assignment, {name: find}, gives_way=True))

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End the transfers of that quorum, or of any so far, in both directions."""
        with self._lock:
            ended = self._quorum_id if quorum_id is None else quorum_id
            self._revoked_id = max(self._revoked_id, ended)
            fetch = self._fetch
        if ended >= self._quorum_id:
            self._server.cut_off()
            if self._groups is not None:
                self._groups.cancel(ended)
            if fetch is not None:
                fetch.cancel(reason)

    def close(self) -> None:
        self.revoke(None, "the Agent was closed")
        self._server.close()

    def _copies(self, train: dict[str, Any]) -> bool:
        if not self._state.stands_still or self._mode is StateServing.SNAPSHOT:
            return True
        return self._mode is StateServing.AUTO and has_room(size_bytes(train))

    def _keep(self, assignment: Assignment, state: dict[str, Any], targets: list[int]) -> None:
        names = frozenset(assignment.replica_ids[target] for target in targets)
        for key in [key for key, kept in self._kept.items() if kept.targets & names]:
            self._forget(key)
        key = self._key(assignment)
        self._server.keep(key, state, len(targets))
        self._kept[key] = _Kept(names, time.monotonic() + self._timeout_s)

    def _forget_kept(self, assignment: Assignment) -> None:
        """Copies whose targets catch up no more, or have had their time."""
        if self._kept:
            catching_up = {assignment.replica_ids[rank] for rank in assignment.catching_up}
            for key, kept in list(self._kept.items()):
                if not kept.targets & catching_up or time.monotonic() >= kept.until:
                    self._forget(key)

    def _forget(self, key: tuple[int, int, int]) -> None:
        del self._kept[key]
        self._server.forget(key)

    def _fetch_over_group(self, assignment: Assignment) -> dict[str, Any] | None:
        """None: not by this way."""
        if self._groups is None:
            return None
        try:
            received = self._groups.receive(assignment, max_bytes=available_bytes())
            self._check(assignment, received)
        except (RuntimeError, CorruptState, StateMismatch) as error:
            log.warning("the state does not come over the process group: %s", error)
            return None
        return received

    def _begin(self, assignment: Assignment, sources: dict[str, Callable[[], str]]) -> Fetch:
        with self._lock:
            self._quorum_id = assignment.quorum_id
            if assignment.quorum_id <= self._revoked_id:
                raise StateUnavailable(f"quorum {assignment.quorum_id} was revoked")
            self._fetch = self._new_fetch(assignment, sources)
            return self._fetch

    def _new_fetch(
        self, assignment: Assignment, sources: dict[str, Callable[[], str]], *, gives_way: bool = False
    ) -> Fetch:
        return Fetch(
            sources,
            self._key(assignment),
            self._timeout_s,
            accept=lambda received: self._check(assignment, received),
            expect=self._check_layout,
            silence_s=self._timeout_s * SILENCE_SHARE,
            max_bytes=available_bytes(),
            gives_way=gives_way,
        )

    def _sources(self, assignment: Assignment) -> dict[str, Callable[[], str]]:
        named = {assignment.replica_ids[assignment.heal_from_rank or 0]: assignment.heal_from_address}
        named |= {f"the group at {manager}": manager for manager in assignment.other_sources}
        return {name: lambda manager=manager: self._ask(manager) for name, manager in named.items()}

    def _ask(self, manager: str) -> str:
        """Where this rank's counterpart in that group serves its state."""
        with ManagerClient(manager) as client:
            return client.checkpoint_address(self._group_rank, timeout_s=min(ASK_TIMEOUT_S, self._timeout_s))

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

    def _key(self, assignment: Assignment) -> tuple[int, int, int]:
        return (assignment.quorum_id, assignment.max_step, self._group_rank)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A copy that is on offer beyond its step, for who was dealt this rank; until that moment."""

    targets: frozenset[str]
    until: float


class Beside:
    """A transfer on a thread of its own. What it brings, or why it does not come, is in `received` when it is done."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.received: Future[Any] = Future()
        threading.Thread(target=self._run, name="lighthouse catch-up", daemon=True).start()

    def cancel(self, reason: str) -> None:
        self._fetch.cancel(reason)

    def _run(self) -> None:
        try:
            self.received.set_result(self._fetch.run())
        except Exception as e:  # noqa: BLE001  it belongs to who waits for the state
            self.received.set_exception(e)


def has_room(size: int) -> bool:
    """For a copy of so many bytes in each rank of this host."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return available_bytes() > ROOM_FOR_A_COPY * ranks_here * size
