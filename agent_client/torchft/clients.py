"""Clients with the names, arguments and exceptions of torchft's native module.

They use torchft's wire protocol, so they work with both our daemons and torchft's, for example while a job migrates
group by group. Like torchft's clients, they connect in the constructor. A call that times out raises TimeoutError, and
any other failure raises RuntimeError. A waiting call does not hold the GIL.
"""

import dataclasses
import json
import threading
from collections.abc import Generator, Hashable, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

from lighthouse_protocol.coordinator import NO_FILES, TlsFiles, parse_coordinator
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.connection import SyncClient
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import files_from

# As in torchft, all fields of a result can be assigned. Names and defaults are torchft's.


@dataclass(slots=True)
class QuorumResult:
    """Answer to a rank's request for a quorum.

    Args:
        quorum_id (int): Id of the quorum. It changes with the members, and after a failed commit.
        replica_rank (int): Rank of this replica group in the quorum.
        replica_world_size (int): Number of replica groups in the quorum.
        recover_src_manager_address (str): Address of the manager of the group to heal from.
        recover_src_replica_rank (Optional[int]): Replica rank of that group.
        recover_dst_replica_ranks (list[int]): Replica ranks of the groups that heal from this rank.
        store_address (str): Address of the store at which the members connect.
        max_step (int): Highest step among the members.
        max_replica_rank (Optional[int]): Rank among the groups at max_step, or None if this group is behind.
        max_world_size (int): Number of groups at max_step.
        heal (bool): Whether this rank must heal.
        commit_failures (int): Highest number of consecutive failed commits that a member reported.
        replica_ids (list[str]): Names of the members, by replica rank.
    """

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list[int])
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    commit_failures: int = 0
    replica_ids: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class QuorumMember:
    """A member of a quorum, with the values of its request.

    Args:
        replica_id (str): Name of the group.
        address (str): Address of the group's manager.
        store_address (str): Address of the group's store.
        step (int): The group's step.
        world_size (int): Number of ranks in the group.
        shrink_only (bool): Whether the group accepts only groups that were in the last quorum.
        data (dict or None): Additional data from the group's request.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Hashable, object] | None = None


@dataclass(slots=True)
class Timestamp:
    """A point in time.

    Args:
        seconds (int): Seconds since 1970.
        nanos (int): Nanoseconds within the second.
    """

    seconds: int
    nanos: int


@dataclass(slots=True)
class Quorum:
    """A quorum: the replica groups that train together.

    Args:
        quorum_id (int): Id of the quorum.
        participants (list[QuorumMember]): Members, sorted by replica_id.
        created (Timestamp): When the quorum formed.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


def quorum_result(answer: torchft_pb2.ManagerQuorumResponse) -> QuorumResult:
    return QuorumResult(**_fields(answer, QuorumResult))


def quorum(answer: torchft_pb2.LighthouseQuorumResponse) -> Quorum:
    created = answer.quorum.created
    participants: list[QuorumMember] = []
    for member in answer.quorum.participants:
        fields = _fields(member, QuorumMember)
        fields["data"] = json.loads(member.data) if member.data else None
        participants.append(QuorumMember(**fields))
    return Quorum(answer.quorum.quorum_id, participants, Timestamp(created.seconds, created.nanos))


def _fields(message: Any, kind: type) -> dict[str, Any]:
    """Return the fields of `message` that the dataclass `kind` also has. An unset optional field is None."""
    found: dict[str, Any] = {}
    for name in (each.name for each in dataclasses.fields(kind)):
        value = getattr(message, name)
        is_missing = message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name)
        found[name] = None if is_missing else list(value) if isinstance(value, MutableSequence) else value
    return found


T = TypeVar("T")

_LIGHTHOUSE = "/torchft.LighthouseService/"
_MANAGER = "/torchft.ManagerService/"


class LighthouseClient:
    """Client of the lighthouse, for scripts that form quorums without a ManagerServer.

    Args:
        addr (str): Address of the lighthouse.
        connect_timeout (timedelta): Time limit for connecting.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self.addr = addr
        self.connect_timeout = connect_timeout
        self._channel = Channel(addr, connect_timeout, files_from())

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Hashable, object] | None = None,
    ) -> Quorum:
        """Request to be in the next quorum, and wait until it has formed.

        The arguments describe the requesting group (see QuorumMember). `data` must be serializable as JSON.
        """
        try:
            text = json.dumps(data) if data is not None else ""
        except (TypeError, ValueError) as e:
            raise RuntimeError(f"data: {e}") from None
        requester = torchft_pb2.QuorumMember(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=world_size or 0,
            shrink_only=shrink_only or False,
            data=text,
        )
        request = torchft_pb2.LighthouseQuorumRequest(requester=requester)
        answer = torchft_pb2.LighthouseQuorumResponse
        return self._channel.call(Rpc(_LIGHTHOUSE + "Quorum", request, answer, quorum), timeout)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Report to the lighthouse that the group `replica_id` is alive."""
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id)
        answer = torchft_pb2.LighthouseHeartbeatResponse
        self._channel.call(Rpc(_LIGHTHOUSE + "Heartbeat", request, answer, lambda _: None), timeout)


_connected = threading.Event()


def has_connected() -> bool:
    """Return True once this process has connected to a manager."""
    return _connected.is_set()


class ManagerClient:
    """Client with which a rank calls its replica group's manager.

    Args:
        addr (str): Address of the manager.
        connect_timeout (timedelta): Time limit for connecting.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._channel = Channel(addr, connect_timeout)
        _connected.set()

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
    ) -> QuorumResult:
        """Request a quorum for `step`. Wait until every rank in the group has requested it and the quorum has formed.

        torchft's Manager calls this method.
        """
        request = torchft_pb2.ManagerQuorumRequest(
            group_rank=group_rank,
            step=step,
            checkpoint_metadata=checkpoint_metadata,
            shrink_only=shrink_only,
            init_sync=init_sync,
            commit_failures=commit_failures,
        )
        answer = torchft_pb2.ManagerQuorumResponse
        return self._channel.call(Rpc(_MANAGER + "Quorum", request, answer, quorum_result), timeout)

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return the address at which `rank` serves its state, from the rank's last request for a quorum."""
        request = torchft_pb2.CheckpointMetadataRequest(rank=rank)
        answer = torchft_pb2.CheckpointMetadataResponse
        return self._channel.call(
            Rpc(_MANAGER + "CheckpointMetadata", request, answer, attrgetter("checkpoint_metadata")), timeout
        )

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote on a step. Wait for all ranks in the group, and return whether the step succeeded on all of them."""
        request = torchft_pb2.ShouldCommitRequest(group_rank=group_rank, step=step, should_commit=should_commit)
        answer = torchft_pb2.ShouldCommitResponse
        return self._channel.call(Rpc(_MANAGER + "ShouldCommit", request, answer, attrgetter("should_commit")), timeout)


class Channel(SyncClient):
    """Client of a server. Its methods raise torchft's exceptions, RuntimeError and TimeoutError, instead of ours."""

    def __init__(self, addr: str, connect_timeout: timedelta, files: TlsFiles = NO_FILES) -> None:
        """Connect to a server. Raise RuntimeError if it does not answer within `connect_timeout`.

        `files` are the TLS files for a lighthouse. A manager needs none.
        """
        with _torchft_errors():
            super().__init__(parse_coordinator(addr, "addr", default_port=None).with_files(files), ())
        try:
            self.connect(connect_timeout.total_seconds())
        except Unreachable as e:
            self.close()
            advice = "check the address and that the server runs, or give it a longer connect_timeout"
            raise RuntimeError(f"failed to connect: {e}; {advice}") from None

    def call(self, rpc: Rpc[T], timeout: timedelta) -> T:
        """Execute `rpc` within `timeout` and return its answer. Fail immediately if the server is down."""
        with _torchft_errors():
            return self.invoke(dataclasses.replace(rpc, timeout_s=timeout.total_seconds(), wait_for_ready=False))


@contextmanager
def _torchft_errors() -> Generator[None]:
    try:
        yield
    except DeadlinePassed as e:
        # Scripts search the message for torchft's text, so it comes first.
        raise TimeoutError(f'status: Cancelled, message: "Timeout expired", details: {e}') from None
    except LighthouseError as e:
        raise RuntimeError(str(e)) from None
