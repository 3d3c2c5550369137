"""Healing in one rank: as a *source*, it sends its state to a peer, and as a *target*, it receives a peer's state.

A rank that is up to date serves the state of its step to the peers that are healing. They read the rank's tensors in
place. Before the rank next changes its state, it waits until they have finished, for up to `timeout_s` or until the
quorum is revoked. Ranks without an assigned target also serve their state: they send parts of a large state, and
replace a source that fails.

A source serves a copy in two cases. If its state changes during the step (`TrainState.stands_still` is False), it
serves a copy until the next step. For a target that is catching up, the source keeps a copy beyond the step, or refuses
if it has no memory for a copy.

In blocking mode, a target fetches and installs the state before it computes anything in the step. So once a source has
completed a collective over all participants, every target has received the state or failed. No rank changes its state
before that, so the peers can read the state in place until the vote.

A target that is catching up fetches on a separate thread (`BackgroundFetch`), and no other group waits for it.
"""

import logging
import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent_client.healing.connection import StateKey
from agent_client.healing.fetch import Fetch, FindAddress
from agent_client.healing.server import StateServer
from agent_client.progress.activity import Activity, HealMark
from agent_client.state.snapshot import StateMismatch, size_bytes
from agent_client.state.train_state import TrainState
from lighthouse_protocol.messages.membership import Assignment, Tag
from lighthouse_protocol.rules.heal import GroupHeal
from lighthouse_runtime.client.clients import ManagerClient
from lighthouse_runtime.net.address import listening_host

log = logging.getLogger(__name__)


LOG_INTERVAL_S = 1.0


_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
ROOM_FOR_A_COPY = 2.0
"""A state is copied only if more than this many times its size is free."""


def has_room(size: int) -> bool:
    """Return whether this host has memory for a copy of `size` bytes in each of its ranks."""
    return available_bytes() > ROOM_FOR_A_COPY * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * size


def available_bytes() -> int:
    """Return how many bytes this process can still allocate. Page cache that can be dropped counts as free.

    The limits are the memory of the host and of the process's cgroups (v2), as in containers and Slurm jobs.
    """
    free = [_fields(_MEMINFO)["MemAvailable:"] * 1024]
    own = next((line[3:] for line in _OWN_CGROUPS.read_text().splitlines() if line.startswith("0::/")), None)
    folder = _CGROUPS / (own or "").lstrip("/")
    groups = [] if own is None else [each for each in (folder, *folder.parents) if each.is_relative_to(_CGROUPS)]
    for group in groups:
        if (limit := _number(group / "memory.max")) is not None:
            used = _number(group / "memory.current") or 0
            free.append(max(0, limit - used + _fields(group / "memory.stat").get("inactive_file", 0)))
    return min(free)


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file does not exist or contains "max" (no limit)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value, *_ in map(str.split, lines)}


ADDRESS_TIMEOUT_S = 5.0
SILENCE_SHARE = 0.1
"""Share of the heal timeout for which a source may send nothing, if there is another source."""

Sources = dict[str, FindAddress]


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
    def batches(self) -> int: ...

    def work_at(self, step: int, tag_quorum_id: int | None) -> None: ...

    def begin_install(self) -> None: ...

    def finish_install(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None: ...


MAX_REASON_CHARS = 300


class BackgroundFetch:
    def __init__(self, fetch: Fetch, mark: HealMark, activity: Activity) -> None:
        self._fetch = fetch
        self._mark = mark
        self._activity = activity
        self.received: Future[Any] = Future()
        threading.Thread(target=self._run, name="lighthouse catch-up", daemon=True).start()

    def cancel(self, reason: str) -> None:
        self._fetch.cancel(reason)

    def _run(self) -> None:
        try:
            self.received.set_result(_run_logged(self._fetch, self._mark, self._activity, is_catching_up=True))
        except Exception as e:  # noqa: BLE001  CatchUpDriver polls `received`
            self.received.set_exception(e)


def _run_logged(fetch: Fetch, mark: HealMark, activity: Activity, *, is_catching_up: bool = False) -> dict[str, Any]:
    """Run the transfer and log its progress. Then set `mark` to done or, after an exception, to failed.

    If `is_catching_up`, the log lines say that the rank is catching up.
    """
    began_at, is_over = time.monotonic(), threading.Event()
    heal = GroupHeal(settled_s=0.0, is_catching_up=is_catching_up)

    def log_progress() -> None:
        now = time.monotonic()
        heal.add_report(0, "", mark.to_message(), now)  # GroupHeal could track several ranks
        while line := heal.next_line(now):
            log.info("%s", line)

    def follow() -> None:
        while not is_over.wait(LOG_INTERVAL_S):
            log_progress()

    log_progress()
    thread = threading.Thread(target=follow, name="lighthouse heal", daemon=True)
    thread.start()
    try:
        received = fetch.run()
        mark.mark_done()
    except BaseException:
        mark.mark_failed()
        raise
    finally:
        is_over.set()
        thread.join(LOG_INTERVAL_S)
        log_progress()
    activity.heal_received(time.monotonic() - began_at, size_bytes(received["train"]))
    return received


class Healing:
    """Serves this rank's state to peers, and fetches a peer's state. `revoke` is the only thread-safe method."""

    def __init__(
        self, state: TrainState, group_rank: int, host: str, timeout_s: float, activity: Activity | None = None
    ) -> None:
        self._state = state
        self._group_rank = group_rank
        self._timeout_s = timeout_s
        self._activity = activity or Activity(time.monotonic)
        self._server = StateServer(listening_host(host), advertise=host)
        self._is_read_in_place = False
        self._quorum_id = 0
        """Id of the last quorum under which this rank served or fetched a state."""
        self._received: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._fetch_quorum_id = 0
        self._revoked_id = 0

    @property
    def address(self) -> str:
        return self._server.address

    def serve(self, assignment: Assignment, machine: StateOwner) -> None:
        """Serve this step's state if a participant can heal from it. First call `release` for the previous step."""
        self._quorum_id = assignment.quorum_id
        self._is_read_in_place = False
        catching_up, now = {assignment.replica_ids[rank] for rank in assignment.catching_up}, time.monotonic()
        self._server.drop_kept(lambda kept: now >= kept.until or not kept.targets & catching_up)
        beside = [target for target in assignment.serve_to if target in assignment.catching_up]
        is_source = len(beside) < len(assignment.serve_to)
        is_up_to_date = not (assignment.heals or machine.must_install or assignment.catches_up)
        offers = assignment.has_healing and is_up_to_date and (is_source or self._state.stands_still)
        if offers or beside:
            try:
                self._offer(assignment, machine, beside, offers=offers)
            except (TypeError, ValueError) as error:  # a retry would not help: the refusal makes the healing group exit
                self._server.withdraw()
                log.error("cannot send the state to the healing group: %s", error)
                self._server.refuse(self._key(assignment), str(error)[:MAX_REASON_CHARS], assignment.secret)
        if not offers:
            self._server.withdraw()
        self._server.refuse_up_to(assignment.quorum_id, assignment.max_step)

    def withdraw(self) -> None:
        self._server.withdraw()

    def release(self, *, is_committed: bool) -> None:
        """Wait until no peer is reading the state in place. After a discarded step, disconnect readers immediately."""
        if self._is_read_in_place:
            self._server.withdraw(self._timeout_s if is_committed else 0.0)
            self._is_read_in_place = False

    def fetch(self, assignment: Assignment) -> None:
        """Fetch a peer's state if the assignment requires this rank to heal. Raise the exceptions of `Fetch.run`."""
        self._quorum_id, self._received = assignment.quorum_id, None
        if not assignment.heals:
            return
        sources = self._sources(assignment)
        mark = self._activity.heal_begins(next(iter(sources)), assignment.max_step)
        fetch = self._new_fetch(assignment, sources, mark)
        with self._lock:
            self._fetch, self._fetch_quorum_id = fetch, assignment.quorum_id
            is_revoked = assignment.quorum_id <= self._revoked_id
        if is_revoked:
            fetch.cancel(f"quorum {assignment.quorum_id} was revoked")
        self._received = _run_logged(fetch, mark, self._activity)

    def install(self, machine: StateOwner) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        agent = received["agent"]
        machine.begin_install()
        self._state.install(received["train"])
        machine.finish_install(agent["step"], agent["tag_quorum_id"], agent["batches_committed"])

    def fetch_in_background(self, assignment: Assignment) -> BackgroundFetch:
        """Start fetching the assigned source's state on another thread, while training continues."""
        name, find = next(iter(self._sources(assignment).items()))
        mark = self._activity.heal_begins(name, assignment.max_step)
        fetch = self._new_fetch(assignment, {name: find}, mark, is_background=True)
        return BackgroundFetch(fetch, mark, self._activity)

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """Cancel the blocking transfers of this quorum and earlier ones, in both directions, and any later fetch.

        `quorum_id` None means the current quorum. Background transfers, for groups that are catching up, continue.
        """
        ended = self._quorum_id if quorum_id is None else quorum_id
        with self._lock:
            self._revoked_id = max(self._revoked_id, ended)
            fetch = self._fetch if self._fetch_quorum_id <= ended else None
        if fetch is not None:
            fetch.cancel(reason)
        if ended >= self._quorum_id:
            self._server.disconnect_readers()

    def close(self) -> None:
        self.revoke(None, "the Agent was closed")
        self._server.close()

    def _key(self, assignment: Assignment) -> StateKey:
        return StateKey(assignment.quorum_id, assignment.max_step, self._group_rank)

    # -- as a source

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
            targets = frozenset(assignment.replica_ids[target] for target in beside)
            self._server.drop_kept(lambda kept: kept.targets & targets)
            until = time.monotonic() + self._timeout_s
            self._server.keep(self._key(assignment), state, targets, until, assignment.secret)
        elif beside:
            log.warning("no memory for a copy of the state: a group that catches up must use another source, or block")
        if offers:
            self._server.publish(self._key(assignment), state, assignment.secret)
            self._is_read_in_place = not copies

    # -- as a target

    def _new_fetch(
        self, assignment: Assignment, sources: Sources, mark: HealMark, *, is_background: bool = False
    ) -> Fetch:
        return Fetch(
            sources,
            self._key(assignment),
            self._timeout_s,
            secret=assignment.secret,
            accept=lambda received: self._check_received(assignment, received),
            expect=self._check_layout,
            silence_s=self._timeout_s * SILENCE_SHARE,
            max_bytes=available_bytes(),
            is_background=is_background,
            on_received=mark.record_bytes,
            # At step 0, all groups may have loaded the same weights, so compare before fetching.
            own=None if assignment.max_step else {"train": self._state.in_place(), "agent": {}},
        )

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

    def _check_received(self, assignment: Assignment, received: object) -> None:
        match received:
            case {
                "train": dict() as train,
                "agent": {"step": int() as step, "tag_quorum_id": int() as tag, "batches_committed": int()},
            } if 0 <= tag <= assignment.quorum_id:
                if step != assignment.max_step:
                    raise StateMismatch(f"it is of step {step}, not {assignment.max_step}")
                if assignment.tag_quorum_id not in (None, tag):
                    raise StateMismatch(f"quorum {tag} has committed it, not {assignment.tag_quorum_id}")
                self._state.check(train)
            case _:
                raise StateMismatch("it was not sent by an Agent, or a later quorum has committed it")

    def _check_layout(self, announced: object) -> None:
        # Called before the first tensor is received, so that the state of a different model fails immediately.
        if isinstance(announced, dict) and isinstance(train := announced.get("train"), dict):
            self._state.check_layout(train)
