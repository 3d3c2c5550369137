"""One rank's side of healing: as a source (source.py), as a target, and the log of a heal.

A target that heals in the blocking way fetches and installs before it computes anything in the step. So when a source
has completed a collective over all participants, every target has received the state or failed. No rank writes its
state before that, so peers can read an up-to-date state in place until the vote.

A target that catches up fetches on a separate thread (`BackgroundFetch`), and no other group waits for it.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from agent_client.healing.connection import StateUnavailable
from agent_client.healing.fetch import Fetch, FindAddress, OnBytes
from agent_client.healing.memory import available_bytes
from agent_client.healing.source import HealSource, StateOwner, key_of
from agent_client.progress.activity import HealMark
from agent_client.state.snapshot import StateMismatch, size_bytes
from agent_client.state.train_state import TrainState
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.rules.heal import GroupHeal
from lighthouse_runtime.client.clients import ManagerClient

log = logging.getLogger(__name__)


LOG_INTERVAL_S = 1.0
_RANK, _PROCESS = 0, ""  # GroupHeal can track several ranks; this log has one


@contextmanager
def logged(mark: HealMark, *, is_beside: bool = False) -> Generator[None]:
    """Log the transfer that the block runs, and mark its end or, after an exception, its failure.

    With `is_beside`, the lines use the words for catching up.
    """
    heal, is_over = GroupHeal(settled_s=0.0, is_beside=is_beside), threading.Event()
    _log_progress(heal, mark)

    def follow() -> None:
        while not is_over.wait(LOG_INTERVAL_S):
            _log_progress(heal, mark)

    thread = threading.Thread(target=follow, name="lighthouse heal", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        mark.failed()
        raise
    else:
        mark.over()
    finally:
        is_over.set()
        thread.join(LOG_INTERVAL_S)
        _log_progress(heal, mark)


def _log_progress(heal: GroupHeal, mark: HealMark) -> None:
    now = time.monotonic()
    heal.add_report(_RANK, _PROCESS, mark.read(), now)
    while line := heal.next_line(now):
        log.info("%s", line)


ADDRESS_TIMEOUT_S = 5.0
SILENCE_SHARE = 0.1
"""Share of the heal timeout for which a source may send nothing while there is another source."""

Sources = dict[str, FindAddress]
"""Maps the name of a source to a function that looks up the address at which it serves its state."""

OnReceived = Callable[[float, int], None]
"""Receives the seconds of a transfer and the bytes of its tensors."""
OnBegun = Callable[[str, int], HealMark]
"""Creates the mark of a heal from the source, at the step."""


def unread_mark(source: str, step: int) -> HealMark:
    return HealMark(1, source, step, time.monotonic)


class DoesNotFit(StateMismatch):
    """The source sent the right state, but this rank has another model or optimizer. No later state will fit either."""


@contextmanager
def _unfit() -> Generator[None]:
    try:
        yield
    except StateMismatch as error:
        raise DoesNotFit(f"{error}", error.difference) from None


class BackgroundFetch:
    def __init__(self, fetch: Fetch, mark: HealMark, on_received: OnReceived = lambda seconds, nbytes: None) -> None:
        self._fetch = fetch
        self._mark = mark
        self._on_received = on_received
        self.received: Future[Any] = Future()
        """The received state, or the error."""
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
        except Exception as e:  # noqa: BLE001  CatchUpDriver polls `received`
            self.received.set_exception(e)


class Healing:
    """Both sides of healing in one rank. Only `revoke` is thread-safe."""

    def __init__(
        self,
        state: TrainState,
        group_rank: int,
        host: str,
        timeout_s: float,
        *,
        on_received: OnReceived = lambda seconds, nbytes: None,
        on_begun: OnBegun = unread_mark,
    ) -> None:
        self._source = HealSource(state, group_rank, host, timeout_s)
        self._state = state
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._on_received = on_received
        self._on_begun = on_begun
        self._quorum_id = 0
        """The last quorum in which this rank served or fetched."""
        self._received: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._fetch_quorum_id = 0
        self._revoked_id = 0

    @property
    def address(self) -> str:
        return self._source.address

    def serve(self, assignment: Assignment, machine: StateOwner) -> None:
        self._quorum_id = assignment.quorum_id
        self._source.serve(assignment, machine)

    def withdraw(self) -> None:
        self._source.withdraw()

    def release(self, *, is_committed: bool) -> None:
        """Wait until the state may be overwritten. After a discarded step, end its readers at once."""
        self._source.release(is_committed=is_committed)

    def fetch(self, assignment: Assignment) -> None:
        """Receive a peer's state if this rank heals. Raises the errors of `Fetch.run`."""
        self._quorum_id, self._received = assignment.quorum_id, None
        if not assignment.heals:
            return
        sources = self._sources(assignment)
        began_at, mark = time.monotonic(), self._on_begun(next(iter(sources)), assignment.max_step)
        with logged(mark):
            received = self._begin(assignment, sources, mark.received).run()
        self._received = received
        self._on_received(time.monotonic() - began_at, size_bytes(received["train"]))

    def install(self, machine: StateOwner) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        agent = received["agent"]
        machine.installing()
        self._state.install(received["train"])
        machine.installed(agent["step"], agent["tag_quorum_id"], agent["batches_committed"])

    def fetch_in_background(self, assignment: Assignment) -> BackgroundFetch:
        """Start to receive the state of the assigned source while the steps continue."""
        name, find = next(iter(self._sources(assignment).items()))
        mark = self._on_begun(name, assignment.max_step)
        fetch = self._new_fetch(assignment, {name: find}, mark.received, is_background=True)
        return BackgroundFetch(fetch, mark, self._on_received)

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """End the transfers of that quorum and earlier ones in both directions, or all transfers if it is None.

        Later transfers under these quorums are refused.
        """
        ended = self._quorum_id if quorum_id is None else quorum_id
        with self._lock:
            self._revoked_id = max(self._revoked_id, ended)
            fetch = self._fetch if self._fetch_quorum_id <= ended else None
        if fetch is not None:
            fetch.cancel(reason)
        if ended >= self._quorum_id:
            self._source.cut_off()

    def close(self) -> None:
        self.revoke(None, "the Agent was closed")
        self._source.close()

    def _begin(self, assignment: Assignment, sources: Sources, on_bytes: OnBytes) -> Fetch:
        with self._lock:
            if assignment.quorum_id <= self._revoked_id:
                raise StateUnavailable(f"quorum {assignment.quorum_id} was revoked")
            self._fetch, self._fetch_quorum_id = self._new_fetch(assignment, sources, on_bytes), assignment.quorum_id
            return self._fetch

    def _new_fetch(
        self,
        assignment: Assignment,
        sources: Sources,
        on_bytes: OnBytes,
        *,
        is_background: bool = False,
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
            is_background=is_background,
            on_received=on_bytes,
            own=self._own(assignment),
        )

    def _own(self, assignment: Assignment) -> dict[str, Any] | None:
        # At step 0 all groups may have loaded the same weights.
        return None if assignment.max_step else {"train": self._state.in_place(), "agent": {}}

    def _sources(self, assignment: Assignment) -> Sources:
        named = {assignment.replica_ids[assignment.heal_from_rank or 0]: assignment.heal_from_address}
        named |= {f"the group at {manager}": manager for manager in assignment.other_sources}
        return {name: partial(self._find_address, assignment, manager) for name, manager in named.items()}

    def _find_address(self, assignment: Assignment, manager: str) -> str:
        with ManagerClient(manager) as client:
            return client.checkpoint_address(
                self._group_rank,
                quorum_id=assignment.quorum_id,
                secret=assignment.secret,
                timeout_s=min(ADDRESS_TIMEOUT_S, self._timeout_s),
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
        # Runs before the first tensor is received, so a state of another model fails at once.
        if isinstance(announced, dict) and isinstance(train := announced.get("train"), dict):
            with _unfit():
                self._state.check_layout(train)
