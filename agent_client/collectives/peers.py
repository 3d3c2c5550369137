"""A rank's connection to the same rank in the other replica groups: a process group that is recreated for each quorum.

A separate thread connects the group, because gloo cannot be interrupted while waiting for a peer that never connects.
When the lighthouse revokes the quorum, running collectives are aborted. A quorum's group is connected only once:
after an abort, its peers would not connect again.

The kinds of process groups:

- `gloo`: any tensor, through the CPU. Aborted by closing its connections.
- `nccl`: through the CUDA device. Aborted by NCCL's own abort.
- `isolated`: gloo in a child process, which is killed to abort it. `isolated:nccl` does the same with NCCL.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Literal, get_args

import torch
from torch import Tensor

from agent_client.collectives.gloo import GlooConnector, GlooGroup
from agent_client.collectives.group_spec import Connector, GroupSpec, RankGroup
from agent_client.errors import ConfigurationError
from lighthouse_protocol.messages.membership import Assignment
from lighthouse_protocol.rules.access import STORE_WORD, prove

log = logging.getLogger(__name__)

ProcessGroupName = Literal["gloo", "nccl", "isolated", "isolated:nccl"]
PROCESS_GROUPS: tuple[str, ...] = get_args(ProcessGroupName)
STORE_PREFIX = "lighthouse"
CONNECT_PARTS = 3
"""Number of stages of connecting, each limited by `connect_timeout_s`: store, group, and NCCL's first collective.
Connecting a gloo group may take five times that limit."""


def connector(name: str) -> Connector:
    """Create the connector for a kind of process group. NCCL uses the current CUDA device.

    Raises:
        ConfigurationError: `name` is not in PROCESS_GROUPS, or this kind is not available on this host.
    """
    match name:
        case "gloo":
            return GlooConnector()
        case "nccl":
            from agent_client.collectives.nccl import NcclConnector

            return NcclConnector()
        case "isolated" | "isolated:nccl":
            from agent_client.collectives.isolated import IsolatedConnector

            return IsolatedConnector(name.partition(":")[2] or "gloo")
        case _:
            raise ConfigurationError(f"process_group: {name!r} is not one of {', '.join(PROCESS_GROUPS)}")


class Peers:
    """A rank's process group for the current quorum.

    revoke() and drop() are thread-safe. Call all other methods from one thread.
    """

    def __init__(
        self, group_rank: int, host: str, *, connect_timeout_s: float, timeout_s: float, process_group: str = "gloo"
    ) -> None:
        """Set the parameters, without connecting.

        `connect_timeout_s` limits each part of connecting (see CONNECT_PARTS). `timeout_s` limits a collective that has
        no time limit of its own.
        """
        self._group_rank = group_rank
        self._host = host
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._process_group = process_group
        self._connector = connector(process_group)
        self.last_reconfiguration_s = 0.0
        self._lock = threading.Lock()
        self._quorum_id: int | None = None
        self._place, self._size = 0, 1
        self._connected: Future[RankGroup | None] = Future()
        self._connecting: threading.Thread | None = None

    def configure(self, assignment: Assignment, why_revoked: Callable[[], str | None]) -> None:
        """Connect to the participants of a new quorum. Do nothing if the quorum_id is unchanged.

        `why_revoked` returns why the quorum has been revoked, or None if it has not.

        Raises:
            RuntimeError: A participant did not connect in time, the quorum was revoked, or the group was dropped.
        """
        if assignment.quorum_id == self._quorum_id:
            self._connected.result()
            return
        began_at = time.monotonic()
        self.drop()
        connected: Future[RankGroup | None] = Future()
        self._place, self._size = assignment.replica_rank, assignment.replica_world_size
        with self._lock:
            self._quorum_id, self._connected = assignment.quorum_id, connected
        if (reason := why_revoked()) is not None:
            self.revoke(assignment.quorum_id, reason)
        self._connecting = threading.Thread(
            target=self._connect_in_thread, args=(assignment, connected), name="lighthouse peers", daemon=True
        )
        self._connecting.start()
        limit_s = CONNECT_PARTS * self._connect_timeout_s
        try:
            connected.result(limit_s)
        except TimeoutError:
            names = ", ".join(assignment.replica_ids)
            raise RuntimeError(f"the participants ({names}) did not connect within {limit_s:g} s") from None
        self.last_reconfiguration_s = took_s = time.monotonic() - began_at
        size, kind = assignment.replica_world_size, self._process_group
        log.info("quorum %d: process group (%s) of %d made in %.3f s", assignment.quorum_id, kind, size, took_s)

    def all_reduce(self, tensor: Tensor, timeout_s: float) -> None:
        """Sum the tensor over the participants, in place. Raise RuntimeError if a peer is lost."""
        if self._quorum_id is None:
            raise RuntimeError("no process group exists before the first quorum")
        if (group := self._connected.result()) is not None:
            group.all_reduce(tensor, timeout_s)

    def exchange(self, words: Sequence[int], timeout_s: float) -> list[tuple[int, ...]]:
        """Send `words` to all participants, which must send equally many. Return the words of each, by replica_rank."""
        row = torch.tensor(words, dtype=torch.int64)
        group = self._connected.result() if self._quorum_id is not None else None
        if isinstance(group, GlooGroup):
            table = group.all_gather(row, timeout_s)
        else:
            table = torch.zeros(self._size, len(words), dtype=torch.int64)
            table[self._place] = row
            self.all_reduce(table, timeout_s)
        return [tuple(each) for each in table.tolist()]

    def revoke(self, quorum_id: int | None, reason: str) -> None:
        """Abort running collectives if the current quorum is `quorum_id`. If `quorum_id` is None, always abort them.

        Results of completed collectives stay valid.
        """
        with self._lock:
            if self._quorum_id is not None and quorum_id in (None, self._quorum_id):
                self._fail_group(f"quorum {self._quorum_id} was revoked: {reason}")

    def drop(self) -> None:
        """Abort running collectives on this rank and its peers, and close the group for good."""
        with self._lock:
            if self._quorum_id is not None:
                self._fail_group(f"the process group of quorum {self._quorum_id} was abandoned")

    def close(self) -> None:
        """Drop the group and release all resources.

        Wait for a thread that is still connecting, because it must not run while the interpreter exits.
        """
        self.drop()
        if self._connecting is not None:
            self._connecting.join(self._connect_timeout_s)
        self._connector.close()

    def _fail_group(self, reason: str) -> None:
        ended: Future[RankGroup | None] = Future()
        ended.set_exception(RuntimeError(reason))
        connected, self._connected = self._connected, ended
        try:
            connected.set_exception(RuntimeError(reason))  # the group is still connecting: end the wait for it
        except InvalidStateError:
            if connected.exception() is None and (group := connected.result()) is not None:
                group.abort()

    def _connect_in_thread(self, assignment: Assignment, connected: "Future[RankGroup | None]") -> None:
        try:
            group = self._connect(assignment) if assignment.replica_world_size > 1 else None
        except Exception as e:  # noqa: BLE001  `configure` raises it
            with contextlib.suppress(InvalidStateError):
                connected.set_exception(e)
            return
        try:
            connected.set_result(group)
        except InvalidStateError:
            if group is not None:
                group.abort()

    def _connect(self, assignment: Assignment) -> RankGroup:
        prefix = f"{STORE_PREFIX}/{assignment.quorum_id}/{self._group_rank}"
        if assignment.compares and assignment.secret:
            # A digest that only the members can compute keeps quorums apart. It hides nothing: torch's store lists its
            # keys to any caller. Scripts with another client know no quorum secret. If one takes part, use no digest.
            prefix += f"/{prove(assignment.secret, STORE_WORD, prefix)}"
        spec = GroupSpec(
            store_address=assignment.store_address,
            prefix=prefix,
            rank=assignment.replica_rank,
            size=assignment.replica_world_size,
            host=self._host,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
        )
        return self._connector.connect(spec)
