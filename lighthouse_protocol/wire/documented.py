"""Conversion between the classes in membership.py and the protobuf messages that torchft defined.

There are two forms of each message: torchft's, and the native one with our additional fields. The lighthouse relays
members to callers of both forms. A field that a caller's form lacks is relayed as an unknown field. A field that has
different numbers in the two forms is written under both numbers.
"""

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from lighthouse_protocol.constraints import check_count, check_quorum_id
from lighthouse_protocol.identity import parse_address, read_identity
from lighthouse_protocol.limits import MAX_DATA_BYTES, MAX_GROUP_WORLD_SIZE, MAX_MEMBER_BYTES
from lighthouse_protocol.messages.membership import Assignment, Decision, Distrust, Participant, Quorum
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import DISTRUST, WORLD, register_codec

# Fields with the same name in a dataclass and its protobuf message.
_IN_BOTH_FORMS = ("address", "store_address", "step", "shrink_only", "commit_failures", "data")
_NATIVE_ONLY = (
    "ranks_disagree",
    "seen_quorum_id",
    "watched",
    "catch_up",
    "has_source",
    "resolves_to_loopback",
    "compares",
    "continues",
)
_NATIVE_OPTIONAL = ("tag_quorum_id", "works_at", "heals_first")
_ASSIGNMENT = (
    "quorum_id",
    "replica_rank",
    "replica_world_size",
    "store_address",
    "max_step",
    "max_world_size",
    "contributors",
    "commit_failures",
    "revoked",
    "compares",
    "secret",
)
_ASSIGNMENT_OPTIONAL = ("max_rank", "tag_quorum_id", "place")
_ASSIGNMENT_TUPLES = ("replica_ids", "other_sources", "catching_up", "healing")

_Member = lighthouse_pb2.QuorumMember | torchft_pb2.QuorumMember


def _named(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _given(message: Any, *names: str) -> dict[str, Any]:
    """Return the values of the optional fields `names`. The value of an absent field is None."""
    return {name: getattr(message, name) if message.HasField(name) else None for name in names}


def distrust_from_native(message: lighthouse_pb2.QuorumMember | manager_pb2.ManagerQuorumRequest) -> Distrust | None:
    """Convert the optional field `distrust`. Return None if it is absent. Raise InvalidRequest if it is invalid."""
    return DISTRUST.read(message.distrust) if message.HasField("distrust") else None


def distrust_to_native(distrust: Distrust | None) -> lighthouse_pb2.Distrust | None:
    return None if distrust is None else DISTRUST.write(distrust)


def participant_from_native(member: lighthouse_pb2.QuorumMember) -> Participant:
    """Convert a participant from the native form and validate it. Raise InvalidRequest if a field is invalid."""
    check_quorum_id(member.tag_quorum_id, "tag_quorum_id")
    check_quorum_id(member.seen_quorum_id, "seen_quorum_id")
    check_count(member.works_at, "works_at")
    identity = read_identity(member.replica_id, member.incarnation)
    _check_member(member, 1)
    return _participant(member, identity, _relayable(member), **_ours(member))


def participant_from_torchft(member: torchft_pb2.QuorumMember) -> Participant:
    """Convert a participant from torchft's form and validate it. Raise InvalidRequest if a field is invalid.

    A world_size of 0 is valid here, because torchft's client sends it for an unknown size.
    """
    identity = read_identity(member.replica_id, "")
    _check_member(member, 0)
    return _participant(member, identity, _relayable(member))


def _participant(member: _Member, identity: tuple[str, str], raw: bytes, **ours: Any) -> Participant:
    name, incarnation = identity
    return Participant(
        replica_id=name,
        incarnation=incarnation,
        wire_id=member.replica_id,
        group_world_size=member.world_size,
        wire=raw,
        extras=_extras(member, raw),
        **_named(member, *_IN_BOTH_FORMS),
        **ours,
    )


def _ours(member: lighthouse_pb2.QuorumMember) -> dict[str, Any]:
    """Return the fields that only the native form has, as keyword arguments for Participant."""
    return {
        **_named(member, *_NATIVE_ONLY),
        **_given(member, *_NATIVE_OPTIONAL),
        "distrust": distrust_from_native(member),
    }


def _extras(member: Any, raw: bytes) -> bytes:
    """Serialise the fields of a member that the native form lacks. `raw` is the serialised member."""
    native = member if isinstance(member, lighthouse_pb2.QuorumMember) else lighthouse_pb2.QuorumMember.FromString(raw)
    if not len(UnknownFieldSet(native)):
        return b""
    rest: Any = lighthouse_pb2.QuorumMember.FromString(raw)
    for field in rest.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString()


def _relayable(member: _Member) -> bytes:
    """Serialise a member to relay it. Raise InvalidRequest if it is too long or cannot be parsed in the other form."""
    raw = member.SerializeToString()
    if len(raw) > MAX_MEMBER_BYTES:
        raise InvalidRequest(f"has {len(raw)} bytes; at most {MAX_MEMBER_BYTES} are relayed", field="requester")
    other = torchft_pb2.QuorumMember if isinstance(member, lighthouse_pb2.QuorumMember) else lighthouse_pb2.QuorumMember
    try:
        other.FromString(raw)
    except DecodeError:
        raise InvalidRequest("has an unknown field that cannot be relayed", field="requester") from None
    return raw


def _check_member(member: _Member, min_world_size: int) -> None:
    for field, text in (("address", member.address), ("store_address", member.store_address)):
        if text and parse_address(text, field).is_unspecified:
            raise InvalidRequest(
                f"{text!r} is not reachable; advertise an address that the peers can reach", field=field
            )
    check_count(member.step, "step")
    if not min_world_size <= member.world_size <= MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(
            f"is {member.world_size}; a group has 1 to {MAX_GROUP_WORLD_SIZE} ranks", field="world_size"
        )
    if len(member.data.encode()) > MAX_DATA_BYTES:
        raise InvalidRequest(f"has {len(member.data.encode())} bytes; at most {MAX_DATA_BYTES}", field="data")
    check_count(member.commit_failures, "commit_failures")


def quorum_to_native(quorum: Quorum, created_at: float) -> lighthouse_pb2.LighthouseQuorumResponse:
    """Convert a quorum to the native form. `created_at` is a Unix time in seconds."""
    response = lighthouse_pb2.LighthouseQuorumResponse()
    _fill_quorum(response.quorum, quorum, created_at, _fill_native)
    return response


def quorum_to_torchft(quorum: Quorum, created_at: float) -> torchft_pb2.LighthouseQuorumResponse:
    """Convert a quorum to torchft's form. `created_at` is a Unix time in seconds; torchft's client requires it."""
    response = torchft_pb2.LighthouseQuorumResponse()
    _fill_quorum(response.quorum, quorum, created_at, _fill_both)
    return response


def _fill_quorum(message: Any, quorum: Quorum, created_at: float, fill: Callable[[Any, Participant], None]) -> None:
    message.quorum_id = quorum.quorum_id
    message.created.FromNanoseconds(int(created_at * 1e9))
    for participant in quorum.participants:
        fill(message.participants.add(), participant)


def participant_to_native(participant: Participant) -> lighthouse_pb2.QuorumMember:
    member = lighthouse_pb2.QuorumMember()
    _fill_native(member, participant)
    return member


def _fill_native(member: lighthouse_pb2.QuorumMember, participant: Participant) -> None:
    _fill_both(member, participant)
    member.incarnation = participant.incarnation
    # Set or clear each of our fields, since a future torchft may use our numbers for something else.
    for name in _NATIVE_ONLY:
        setattr(member, name, getattr(participant, name))
    for name in _NATIVE_OPTIONAL:
        if (value := getattr(participant, name)) is None:
            member.ClearField(name)
        else:
            setattr(member, name, value)
    member.ClearField("distrust")
    if (distrust := distrust_to_native(participant.distrust)) is not None:
        member.distrust.CopyFrom(distrust)


def _fill_both(member: _Member, participant: Participant) -> None:
    member.MergeFromString(participant.wire)
    member.replica_id, member.world_size = participant.wire_id, participant.group_world_size
    for name in _IN_BOTH_FORMS:
        setattr(member, name, getattr(participant, name))


def quorum_from_native(message: lighthouse_pb2.Quorum) -> Quorum:
    """Convert a quorum that a lighthouse sent. Raise InvalidRequest if an id is malformed.

    Other fields are not checked, because the lighthouse has checked the members already.
    """
    return Quorum(check_quorum_id(message.quorum_id), tuple(map(_received_participant, message.participants)))


def _received_participant(member: lighthouse_pb2.QuorumMember) -> Participant:
    identity = read_identity(member.replica_id, member.incarnation)
    return _participant(member, identity, member.SerializeToString(), **_ours(member))


def assignment_to_native(answer: Assignment) -> manager_pb2.ManagerQuorumResponse:
    return manager_pb2.ManagerQuorumResponse(
        address=answer.heal_from_address or answer.primary_address,
        heal=answer.heals,
        recover_src_replica_rank=answer.heal_from_rank,
        recover_dst_replica_ranks=answer.serve_to,
        world=None if answer.world is None else WORLD.write(answer.world),
        **_named(answer, *_ASSIGNMENT, *_ASSIGNMENT_OPTIONAL, *_ASSIGNMENT_TUPLES),
    )


def assignment_from_native(message: manager_pb2.ManagerQuorumResponse) -> Assignment:
    return Assignment(
        primary_address="" if message.heal else message.address,
        heal_from_rank=message.recover_src_replica_rank if message.heal else None,
        heal_from_address=message.address if message.heal else "",
        serve_to=tuple(message.recover_dst_replica_ranks),
        world=WORLD.read(message.world) if message.HasField("world") else None,
        **_named(message, *_ASSIGNMENT),
        **_given(message, *_ASSIGNMENT_OPTIONAL),
        replica_ids=tuple(message.replica_ids),
        other_sources=tuple(message.other_sources),
        catching_up=tuple(message.catching_up),
        healing=tuple(message.healing),
    )


def vote_to_native(decision: Decision) -> manager_pb2.ShouldCommitResponse:
    granted = None if decision.next is None else assignment_to_native(decision.next)
    return manager_pb2.ShouldCommitResponse(should_commit=decision.commit, next=granted)


def vote_from_native(message: manager_pb2.ShouldCommitResponse) -> Decision:
    return Decision(message.should_commit, assignment_from_native(message.next) if message.HasField("next") else None)


def assignment_to_torchft(answer: Assignment, handles: Iterable[str]) -> torchft_pb2.ManagerQuorumResponse:
    return torchft_pb2.ManagerQuorumResponse(
        quorum_id=answer.quorum_id,
        recover_src_manager_address=answer.heal_from_address,
        recover_src_replica_rank=answer.heal_from_rank,
        recover_dst_replica_ranks=answer.serve_to,
        store_address=answer.store_address,
        max_step=answer.max_step,
        max_replica_rank=answer.max_rank,
        max_world_size=answer.max_world_size,
        replica_rank=answer.replica_rank,
        replica_world_size=answer.replica_world_size,
        heal=answer.heals,
        commit_failures=answer.commit_failures,
        replica_ids=answer.replica_ids,
        reconfigure_handles=handles,
    )


register_codec(Participant, lighthouse_pb2.QuorumMember, participant_to_native, participant_from_native)
register_codec(Quorum, lighthouse_pb2.Quorum, lambda quorum: quorum_to_native(quorum, 0.0).quorum, quorum_from_native)
register_codec(Decision, manager_pb2.ShouldCommitResponse, vote_to_native, vote_from_native)
