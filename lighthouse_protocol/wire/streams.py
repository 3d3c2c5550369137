"""Codecs of the message streams, and serialised parts of messages that many streams share.

A message of an unknown type is read as None, and readers skip it.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from lighthouse_protocol.limits import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from lighthouse_protocol.messages.hosts import FromHost, ToHost
from lighthouse_protocol.messages.incident import SelfReport
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.preemption import PreemptionReport
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import FromRunRank, FromSupervisor, ToRunRank, ToSupervisor
from lighthouse_protocol.messages.session import (
    Evidence,
    FromRank,
    Heartbeat,
    QuorumChanged,
    ToLighthouse,
    ToManager,
    ToRank,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import hosts_pb2, run_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.codec import Oneof, compiled, register_codec

M = TypeVar("M")

MAX_PROGRESS_BYTES = MAX_REQUEST_BYTES // 2
DEFLATED_ABOVE_BYTES = 4096
_FASTEST = 1  # zlib's best compression makes a long quorum a tenth shorter and takes three times the time


class Stream(Generic[M]):
    """Codec for the messages in one direction of a stream."""

    def __init__(self, union: Any, schema: type[Message], advisory: Iterable[type[Any]] = ()) -> None:
        """Compile the codec of `schema`, a message with a single oneof. Its fields are the classes of `union`.

        Invalid messages of the `advisory` classes are read as None instead of raising InvalidRequest.
        """
        [oneof] = schema.DESCRIPTOR.oneofs
        self.schema = schema
        self._oneof = Oneof(union, oneof, advisory)
        # Raises InvalidRequest that names the field.
        self.read: Callable[[Message], M | None] = self._oneof.read

    def write(self, message: M) -> Message:
        return self.schema(**self._oneof.write(message))


class _DeflatedStream(Stream[M]):
    """A stream whose messages may contain a part that is compressed with zlib."""

    def __init__(self, union: Any, schema: type[Message]) -> None:
        super().__init__(union, schema)
        self.read = self._read_whole

    def _read_whole(self, message: Any) -> M | None:
        if message.deflated:
            _inflate(message)
        return self._oneof.read(message)


def _deflate(message: Message) -> bytes:
    body = message.SerializeToString()
    if len(body) <= DEFLATED_ABOVE_BYTES:
        return body
    return lighthouse_pb2.SessionResponse(deflated=zlib.compress(body, _FASTEST)).SerializeToString()


def _inflate(message: Any) -> None:
    inflater = zlib.decompressobj()
    try:
        message.MergeFromString(inflater.decompress(message.deflated, MAX_RESPONSE_BYTES))
    except (zlib.error, DecodeError) as e:
        raise InvalidRequest(f"cannot be read: {e}", field="deflated") from e
    if not inflater.eof:
        raise InvalidRequest(f"is cut, or has more than {MAX_RESPONSE_BYTES} bytes", field="deflated")


# Session streams.


def _write_heartbeat(heartbeat: Heartbeat) -> lighthouse_pb2.Heartbeat:
    """Convert a heartbeat to protobuf, with at most MAX_PROGRESS_BYTES of progress.

    If the progress is longer, drop each rank's phase counts and times, and if that is not enough, all progress.
    """
    message = _HEARTBEAT.write(heartbeat)
    if heartbeat.progress is not None and message.progress.ByteSize() > MAX_PROGRESS_BYTES:
        for rank in message.progress.ranks:
            del rank.sample.entered[:], rank.sample.times[:]
        if message.progress.ByteSize() > MAX_PROGRESS_BYTES:
            message.ClearField("progress")
    return message


_HEARTBEAT = compiled(Heartbeat, lighthouse_pb2.Heartbeat)
register_codec(Heartbeat, lighthouse_pb2.Heartbeat, _write_heartbeat, _HEARTBEAT.read)

SESSION_REQUESTS: Stream[ToLighthouse] = Stream(
    ToLighthouse, lighthouse_pb2.SessionRequest, advisory=(Evidence, PreemptionReport)
)
SESSION_RESPONSES: Stream[ToManager] = _DeflatedStream(ToManager, lighthouse_pb2.SessionResponse)


def accepted_shared(quorum: Quorum, stands: bool, created_at: float, secret: str = "") -> bytes:
    """Serialise the part of a JoinAccepted that all sessions share, compressed if long.

    `stands` means that this is a standing quorum, and `secret` is shared by its members. `created_at` is a Unix time.
    """
    native = documented.quorum_to_native(quorum, created_at).quorum
    accepted = lighthouse_pb2.JoinAccepted(quorum=native, stands=stands, secret=secret)
    return _deflate(lighthouse_pb2.SessionResponse(join_accepted=accepted))


def accepted_for(shared: bytes, join: int) -> bytes:
    """Return the serialised JoinAccepted for the join with number `join`.

    `shared` is the result of accepted_shared(). Appending the number works because protobuf merges the two messages.
    """
    own = lighthouse_pb2.SessionResponse(join_accepted=lighthouse_pb2.JoinAccepted(join=join))
    return shared + own.SerializeToString()


def changed_shared(changed: QuorumChanged) -> bytes:
    """Serialise the part of a QuorumChanged that all sessions share."""
    return _deflate(SESSION_RESPONSES.write(replace(changed, join=0)))


def changed_for(join: int) -> bytes:
    """Serialise the part of a QuorumChanged that is the receiver's own. Append it to changed_shared()."""
    return lighthouse_pb2.SessionResponse(quorum_changed=lighthouse_pb2.QuorumChanged(join=join)).SerializeToString()


# Streams of a watch, of a run's rank, of a supervisor, and of a supervisor on another host.
WATCH_REQUESTS: Stream[FromRank] = Stream(FromRank, manager_pb2.WatchRequest, advisory=(ProgressSample, SelfReport))
WATCH_RESPONSES: Stream[ToRank] = Stream(ToRank, manager_pb2.WatchResponse)
RANK_REQUESTS: Stream[FromRunRank] = Stream(FromRunRank, run_pb2.RankRequest, advisory=(SelfReport,))
RANK_RESPONSES: Stream[ToRunRank] = Stream(ToRunRank, run_pb2.RankResponse)
SUPERVISOR_REQUESTS: Stream[FromSupervisor] = Stream(FromSupervisor, run_pb2.SupervisorRequest)
SUPERVISOR_RESPONSES: Stream[ToSupervisor] = Stream(ToSupervisor, run_pb2.SupervisorResponse)
NODE_REQUESTS: Stream[FromHost] = Stream(FromHost, hosts_pb2.NodeRequest)
NODE_RESPONSES: Stream[ToHost] = Stream(ToHost, hosts_pb2.NodeResponse)
