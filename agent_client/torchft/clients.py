"""torchft's clients: its arguments and exceptions over our channels, in torchft's own words on the wire.

So they talk to our daemons and to torchft's alike, as while a job is moved group by group. Like torchft's they connect
when they are made. A call that runs out of time raises TimeoutError, any other that fails RuntimeError. Waiting
releases the interpreter's lock.
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

from google.protobuf.message import Message

from lighthouse_protocol.coordinator import NO_FILES, TlsFiles, parse_coordinator
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.connection import SyncClient
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import files_from

# -- results ------------------------------------------------------------------
#
# What the clients answer: torchft's classes, with its names and defaults. All fields may be set, as torchft's may.


@dataclass(slots=True)
class QuorumResult:
    """What a quorum means for one rank.

    Args:
        quorum_id (int): The quorum; it changes with its members, and after a failed commit.
        replica_rank (int): This replica group's place in the quorum.
        replica_world_size (int): The number of replica groups in the quorum.
        recover_src_manager_address (str): The manager of the group to heal from.
        recover_src_replica_rank (Optional[int]): The place of that group.
        recover_dst_replica_ranks (list[int]): The places of those who heal from this rank.
        store_address (str): The store over which the members meet.
        max_step (int): The highest step among the members.
        max_replica_rank (Optional[int]): The place among those at max_step; None for a group that is behind.
        max_world_size (int): The number of those at max_step.
        heal (bool): Whether this rank is to heal.
        commit_failures (int): The most failed commits in a row that a member has told.
        replica_ids (list[str]): The members, by place.
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
    """One replica group of a quorum, as it asked for it.

    Args:
        replica_id (str): The group's name.
        address (str): Its manager.
        store_address (str): Its store.
        step (int): Its step.
        world_size (int): The number of its ranks.
        shrink_only (bool): Whether it wants no group that was not in the last quorum.
        data (dict or None): What else it told.
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
    """A time.

    Args:
        seconds (int): Since 1970.
        nanos (int): Beyond them.
    """

    seconds: int
    nanos: int


@dataclass(slots=True)
class Quorum:
    """The replica groups that train together.

    Args:
        quorum_id (int): The quorum's id.
        participants (list[QuorumMember]): Its members, sorted by replica_id.
        created (Timestamp): When it was formed.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


def quorum_result(answer: torchft_pb2.ManagerQuorumResponse) -> QuorumResult:
    return QuorumResult(**_fields(answer, QuorumResult))


def quorum(answer: torchft_pb2.LighthouseQuorumResponse) -> Quorum:
    created = answer.quorum.created
    return Quorum(
        quorum_id=answer.quorum.quorum_id,
        participants=[_member(member) for member in answer.quorum.participants],
        created=Timestamp(created.seconds, created.nanos),
    )


def _member(member: torchft_pb2.QuorumMember) -> QuorumMember:
    told = _fields(member, QuorumMember)
    told["data"] = json.loads(member.data) if member.data else None
    return QuorumMember(**told)


def _fields(message: Any, kind: type) -> dict[str, Any]:
    """What `message` says in the fields of the dataclass `kind`; None: that one is optional, and not set."""
    described = message.DESCRIPTOR.fields_by_name
    found: dict[str, Any] = {}
    for name in (each.name for each in dataclasses.fields(kind)):
        value = getattr(message, name)
        is_missing = described[name].has_presence and not message.HasField(name)
        found[name] = None if is_missing else list(value) if isinstance(value, MutableSequence) else value
    return found


T = TypeVar("T")

_LIGHTHOUSE = "/torchft.LighthouseService/"
_MANAGER = "/torchft.ManagerService/"


class LighthouseClient:
    """LighthouseClient is a client of the lighthouse, for who forms quorums without a ManagerServer.

    Args:
        addr (str): The address of the lighthouse.
        connect_timeout (timedelta): How long it may take to connect.
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
        """Ask to be in the next quorum, and wait for it.

        Args:
            replica_id (str): The name of the replica group that asks.
            timeout (timedelta): How long to wait for it.
            address (str): The address of its manager.
            store_address (str): The address of its store.
            step (int): Its step.
            world_size (int): The number of its ranks.
            shrink_only (bool): Whether it wants no group that was not in the last quorum.
            data (Optional[dict]): What the other members are told of it; must be fit for JSON.

        Returns:
            Quorum: The quorum.
        """
        requester = torchft_pb2.QuorumMember(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=world_size or 0,
            shrink_only=shrink_only or False,
            data=_as_json(data),
        )
        request = torchft_pb2.LighthouseQuorumRequest(requester=requester)
        answer = torchft_pb2.LighthouseQuorumResponse
        return self._channel.call(Rpc(_LIGHTHOUSE + "Quorum", request, answer, quorum), timeout)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Give one sign of life.

        Args:
            replica_id (str): The name of the replica group.
            timeout (timedelta): How long it may take.
        """
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id)
        answer = torchft_pb2.LighthouseHeartbeatResponse
        self._channel.call(Rpc(_LIGHTHOUSE + "Heartbeat", request, answer, _nothing), timeout)


_connected = threading.Event()


def has_connected() -> bool:
    """Whether this process has ever connected to a manager."""
    return _connected.is_set()


class ManagerClient:
    """ManagerClient is one rank's client of its replica group's manager.

    Args:
        addr (str): The address of the manager.
        connect_timeout (timedelta): How long it may take to connect.
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
        """Ask for the quorum of `step`; answered when every rank of the group has asked and one has formed."""
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
        """What that rank of this manager's group has told with its request: where it serves its state."""
        request = torchft_pb2.CheckpointMetadataRequest(rank=rank)
        answer = torchft_pb2.CheckpointMetadataResponse
        return self._channel.call(
            Rpc(_MANAGER + "CheckpointMetadata", request, answer, attrgetter("checkpoint_metadata")), timeout
        )

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote for a step, and wait for the votes of all ranks of the group.

        Args:
            group_rank (int): The rank that votes.
            step (int): Its step.
            should_commit (bool): Whether its step is good.
            timeout (timedelta): How long to wait for the others.

        Returns:
            bool: Whether all of them are.
        """
        request = torchft_pb2.ShouldCommitRequest(group_rank=group_rank, step=step, should_commit=should_commit)
        answer = torchft_pb2.ShouldCommitResponse
        return self._channel.call(Rpc(_MANAGER + "ShouldCommit", request, answer, attrgetter("should_commit")), timeout)


class Channel(SyncClient):
    """Connected, or RuntimeError. `files`: for the TLS of a lighthouse; a manager has none."""

    def __init__(self, addr: str, connect_timeout: timedelta, files: TlsFiles = NO_FILES) -> None:
        with _torchft_errors():
            super().__init__(parse_coordinator(addr, "addr", default_port=None).with_files(files), ())
        try:
            self.connect(connect_timeout.total_seconds())
        except Unreachable as e:
            self.close()
            advice = "check the address and that the server runs, or give it a longer connect_timeout"
            raise RuntimeError(f"failed to connect: {e}; {advice}") from None

    def call(self, rpc: Rpc[T], timeout: timedelta) -> T:
        """Raises TimeoutError or RuntimeError. A server that has gone is not waited for."""
        with _torchft_errors():
            return self.invoke(dataclasses.replace(rpc, timeout_s=timeout.total_seconds(), wait_for_ready=False))


@contextmanager
def _torchft_errors() -> Generator[None]:
    try:
        yield
    except DeadlinePassed as e:
        # What torchft's says, for scripts that look for it, and the reason.
        raise TimeoutError(f'status: Cancelled, message: "Timeout expired", details: {e}') from None
    except LighthouseError as e:
        raise RuntimeError(str(e)) from None


def _as_json(data: dict[Hashable, object] | None) -> str:
    try:
        return json.dumps(data) if data is not None else ""
    except (TypeError, ValueError) as e:
        raise RuntimeError(f"data: {e}") from None


def _nothing(_: Message) -> None:
    return None
