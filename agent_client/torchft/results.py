"""What the clients answer: torchft's classes, with its names and defaults. All fields may be set, as torchft's may."""

import dataclasses
import json
from collections.abc import Hashable, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from lighthouse_protocol.pb.torchft import torchft_pb2


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
