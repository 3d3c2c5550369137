"""torchft's clients: its arguments and exceptions over our channels, in torchft's own words on the wire.

So they talk to our daemons and to torchft's alike, as while a job is moved group by group. Like torchft's they connect
when they are made. A call that runs out of time raises TimeoutError, any other that fails RuntimeError. Waiting
releases the interpreter's lock.
"""

import dataclasses
import json
import threading
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import TypeVar

from google.protobuf.message import Message

from agent_client.torchft import results
from agent_client.torchft.results import Quorum, QuorumResult
from lighthouse_protocol.coordinator import NO_FILES, TlsFiles, parse_coordinator
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.connection import SyncClient
from lighthouse_runtime.client.rpcs import Rpc
from lighthouse_runtime.security.client_tls import files_from

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
        return self._channel.call(Rpc(_LIGHTHOUSE + "Quorum", request, answer, results.quorum), timeout)

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
        return self._channel.call(Rpc(_MANAGER + "Quorum", request, answer, results.quorum_result), timeout)

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
