"""Messages and what they mean, there and back; what we do not know travels on."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import (
    MAX_DATA_BYTES,
    MAX_GROUP_WORLD_SIZE,
    MAX_QUORUM_ID,
    MAX_REPLICA_ID_CHARS,
)
from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import documented
from tests.lighthouse_protocol.builders import UUID, assignments, field, names, native_participants, torchft_members

NativeMember = lighthouse_pb2.QuorumMember
TorchftMember = torchft_pb2.QuorumMember

SHARED = ("address", "store_address", "step", "shrink_only", "data", "commit_failures")
VALID: dict[str, Any] = {
    "replica_id": "a",
    "address": "http://node-1:29512",
    "store_address": "node-1:29600",
    "step": 3,
    "world_size": 2,
    "data": "{}",
    "commit_failures": 1,
    "shrink_only": True,
}


def native(**fields: Any) -> lighthouse_pb2.QuorumMember:
    return NativeMember(**(VALID | {"incarnation": "i1"} | fields))


def torchft(**fields: Any) -> torchft_pb2.QuorumMember:
    return TorchftMember(**(VALID | fields))


READ = {
    "native": lambda fields: documented.participant_from_native(native(**fields)),
    "torchft": lambda fields: documented.participant_from_torchft(torchft(**fields)),
}


class TestParticipant:
    """That it is read as it was written is in test_messages.py."""

    def test_of_a_native_member(self):
        ours = {"tag_quorum_id": 4, "ranks_disagree": True, "seen_quorum_id": 9, "watched": True}
        shared = {name: value for name, value in VALID.items() if name != "world_size"}
        assert documented.participant_from_native(native(**ours)) == Participant(
            incarnation="i1", wire_id="a", group_world_size=2, **shared, **ours
        )

    @pytest.mark.parametrize("name", ["tag_quorum_id", "works_at"])
    def test_an_absent_number_is_not_0(self, name: str):
        assert getattr(documented.participant_from_native(native()), name) is None
        assert getattr(documented.participant_from_native(native(**{name: 0})), name) == 0

    def test_of_a_torchft_member(self):
        p = documented.participant_from_torchft(torchft(replica_id=f"train:{UUID}"))
        assert (p.replica_id, p.incarnation, p.wire_id) == ("train", UUID, f"train:{UUID}")
        assert (p.tag_quorum_id, p.ranks_disagree, p.seen_quorum_id) == (None, False, 0)

    @pytest.mark.parametrize(("incarnation", "name"), [(UUID, "a"), ("other", f"a:{UUID}")])
    def test_a_native_incarnation_beside_torchfts(self, incarnation: str, name: str):
        p = documented.participant_from_native(native(replica_id=f"a:{UUID}", incarnation=incarnation))
        assert (p.replica_id, p.incarnation, p.wire_id) == (name, incarnation, f"a:{UUID}")


OF_EITHER_FORM: list[tuple[str, object, str]] = [
    ("replica_id", "", "is empty"),
    ("replica_id", "x" * 129, "has 129 characters; at most 128"),
    ("replica_id", "a b", "'a b' has ' '; allowed are A-Z"),
    ("replica_id", "a\n", r"'a\n' has '\n'"),
    ("address", "not an address", "'not an address' is not an address; write host:port"),
    ("address", "host:99999", "'host:99999' has no valid port; a port is a number from 0 to 65535"),
    ("address", "x" * 513, "has 513 characters; at most 512"),
    ("address", "0.0.0.0:1", "'0.0.0.0:1' is not reachable; advertise an address"),
    ("store_address", "a b:1", "'a b:1' is not an address"),
    ("store_address", "http://[::]:1", "'http://[::]:1' is not reachable"),
    ("step", -1, "is -1; it counts from 0"),
    ("world_size", MAX_GROUP_WORLD_SIZE + 1, "is 65537; a group has 1 to 65536 ranks"),
    ("data", "ü" * 2049, "has 4098 bytes; at most 4096"),
    ("commit_failures", -1, "is -1; it counts from 0"),
]
OF_THE_NATIVE_FORM: list[tuple[str, object, str]] = [
    ("incarnation", "1 2", "'1 2' has ' '"),
    ("world_size", 0, "is 0; a group has 1 to 65536 ranks"),
    ("tag_quorum_id", -1, "is -1; quorum ids are 0 to"),
    ("seen_quorum_id", MAX_QUORUM_ID + 1, f"is {MAX_QUORUM_ID + 1}"),
    ("works_at", -1, "is -1; it counts from 0"),
]


class TestBadInput:
    """A violation is INVALID_ARGUMENT and names the field."""

    @pytest.mark.parametrize(
        ("form", "name", "value", "complaint"),
        [
            *[("native", *row) for row in OF_EITHER_FORM + OF_THE_NATIVE_FORM],
            *[("torchft", *row) for row in OF_EITHER_FORM],
        ],
    )
    def test_a_field(self, form: str, name: str, value: object, complaint: str):
        with pytest.raises(InvalidRequest) as refused:
            READ[form]({name: value})
        assert str(refused.value).startswith(f"{name}: {complaint}")
        assert str(refused.value).isprintable()

    def test_what_is_allowed_to_the_limit(self):
        limits = {"replica_id": "x" * MAX_REPLICA_ID_CHARS, "data": "x" * MAX_DATA_BYTES, "world_size": 65536}
        assert documented.participant_from_native(native(**limits)).group_world_size == 65536
        assert documented.participant_from_torchft(torchft(**limits, address="", store_address="")).address == ""
        assert documented.participant_from_torchft(torchft(world_size=0)).group_world_size == 0

    @pytest.mark.parametrize(
        ("read", "member", "number"),
        [
            *[(documented.participant_from_torchft, torchft(), number) for number in (16, 18)],
            *[(documented.participant_from_native, native(), number) for number in (7, 9)],
        ],
    )
    def test_a_field_that_the_other_form_cannot_hold_is_refused_at_its_door(self, read: Any, member: Any, number: int):
        """Else it is the answer that cannot be built, for everybody in the quorum."""
        with pytest.raises(InvalidRequest):
            read(type(member).FromString(member.SerializeToString() + field(number, b"\xff")))


def to_native(participant: Participant) -> lighthouse_pb2.QuorumMember:
    return documented.quorum_to_native(Quorum(7, (participant,)), 0.0).quorum.participants[0]


def to_torchft(participant: Participant) -> torchft_pb2.QuorumMember:
    return documented.quorum_to_torchft(Quorum(7, (participant,)), 0.0).quorum.participants[0]


class TestRelay:
    """Members reach native and torchft callers alike."""

    @given(native_participants)
    def test_both_numbers_are_written_of_a_native_member(self, participant: Participant):
        message = to_torchft(participant)
        assert message.replica_id == participant.wire_id
        assert message.world_size == participant.group_world_size
        for name in SHARED:
            assert getattr(message, name) == getattr(participant, name)

    @given(native_participants)
    def test_what_only_native_callers_know_survives_a_torchft_form(self, participant: Participant):
        came = documented.participant_from_native(documented.participant_to_native(participant))
        relayed = to_torchft(came).SerializeToString()
        assert documented.participant_from_native(NativeMember.FromString(relayed)) == came

    @given(torchft_members)
    def test_both_numbers_are_written_of_a_torchft_member(self, member: torchft_pb2.QuorumMember):
        member.world_size = max(1, member.world_size)
        participant = documented.participant_from_torchft(member)
        message = to_native(participant)
        for name in ("replica_id", "world_size", *SHARED):
            assert getattr(message, name) == getattr(member, name)
        assert message.incarnation == participant.incarnation
        assert not message.HasField("tag_quorum_id")
        again = TorchftMember.FromString(message.SerializeToString())
        assert list(again.reconfigure_handles) == list(member.reconfigure_handles)
        assert to_torchft(participant) == member

    @given(st.binary(max_size=8), st.integers(0, 2**40), names)
    def test_fields_that_nobody_knows_go_native_torchft_native(self, blob: bytes, number: int, name: str):
        unknown = field(100, blob) + field(101, number)
        sent = NativeMember.FromString(native(replica_id=name).SerializeToString() + unknown)
        relayed = to_torchft(documented.participant_from_native(sent)).SerializeToString()
        assert field(100, blob) in relayed
        back = to_native(documented.participant_from_torchft(TorchftMember.FromString(relayed))).SerializeToString()
        assert field(100, blob) in back
        assert field(101, number) in back

    def test_what_the_lighthouse_decided_beats_what_was_sent(self):
        """A member that must heal is handed out at a lower step, in both forms."""
        for p in (documented.participant_from_native(native()), documented.participant_from_torchft(torchft())):
            lowered = replace(p, step=0)
            assert (to_native(lowered).step, to_torchft(lowered).step) == (0, 0)

    def test_a_torchft_field_under_one_of_our_numbers_is_not_taken_for_ours(self):
        """Say a torchft of 2027 gives number 20 to something of its own."""
        sent = TorchftMember.FromString(torchft().SerializeToString() + field(20, 7))
        relayed = to_native(documented.participant_from_torchft(sent))
        assert documented.participant_from_native(relayed).tag_quorum_id is None

    @pytest.mark.parametrize("write", [documented.quorum_to_native, documented.quorum_to_torchft])
    def test_created_is_set_for_both(self, write: Any):
        """torchft's client panics without it."""
        quorum = write(Quorum(7, ()), 12.5).quorum
        assert (quorum.quorum_id, quorum.created.ToNanoseconds()) == (7, 12_500_000_000)

    def test_a_native_manager_reads_a_quorum_with_a_torchft_member_that_told_no_world_size(self):
        """torchft's client says world_size 0 where it was told none."""
        quorum = Quorum(7, (documented.participant_from_torchft(torchft(world_size=0)),))
        assert documented.quorum_from_native(documented.quorum_to_native(quorum, 1.0).quorum) == quorum

    def test_a_malformed_quorum_is_refused(self):
        message = lighthouse_pb2.Quorum(quorum_id=1, participants=[NativeMember(replica_id="")])
        with pytest.raises(InvalidRequest, match="replica_id"):
            documented.quorum_from_native(message)


class TestAssignment:
    @given(assignments, st.none() | st.integers(0, 9))
    def test_there_and_back(self, answer: Assignment, source: int | None):
        """The documented `address` is the manager to heal from; the primary's is not told then."""
        heals = source is not None
        if heals:
            answer = replace(answer, heal_from_rank=source, heal_from_address="h:1", primary_address="")
        message = documented.assignment_to_native(answer)
        again = manager_pb2.ManagerQuorumResponse.FromString(message.SerializeToString())
        assert documented.assignment_from_native(again) == answer
        assert (message.heal, message.address) == (heals, "h:1" if heals else answer.primary_address)
        assert (message.HasField("recover_src_replica_rank"), message.recover_src_replica_rank) == (heals, source or 0)

    def test_rank_0_is_told_from_no_rank(self):
        answer = Assignment(1, 0, 1, (), "", 0, 0, 1, 1, "", heal_from_rank=0)
        message = documented.assignment_to_torchft(answer, [])
        assert (message.HasField("recover_src_replica_rank"), message.HasField("max_replica_rank")) == (True, True)
        message = documented.assignment_to_torchft(replace(answer, heal_from_rank=None, max_rank=None), [])
        assert (message.HasField("recover_src_replica_rank"), message.HasField("max_replica_rank")) == (False, False)

    @given(assignments, st.none() | st.integers(0, 9))
    def test_for_torchft(self, answer: Assignment, source: int | None):
        answer = replace(answer, heal_from_rank=source, heal_from_address="" if source is None else "h:1")
        message = documented.assignment_to_torchft(answer, ["x", "y"])
        assert message == torchft_pb2.ManagerQuorumResponse(
            quorum_id=answer.quorum_id,
            recover_src_manager_address=answer.heal_from_address,
            recover_src_replica_rank=source,
            recover_dst_replica_ranks=list(answer.serve_to),
            store_address=answer.store_address,
            max_step=answer.max_step,
            max_replica_rank=answer.max_rank,
            max_world_size=answer.max_world_size,
            replica_rank=answer.replica_rank,
            replica_world_size=answer.replica_world_size,
            heal=source is not None,
            commit_failures=answer.commit_failures,
            replica_ids=list(answer.replica_ids),
            reconfigure_handles=["x", "y"],
        )


def test_shared_fields_have_shared_numbers_up_to_five():
    """The two forms of QuorumMember are parsed as one another: no number may mean two things of one wire type."""
    ours = {f.name: f.number for f in NativeMember.DESCRIPTOR.fields}
    theirs = {f.name: f.number for f in TorchftMember.DESCRIPTOR.fields}
    for name in ("replica_id", "address", "store_address", "step", "world_size"):
        assert ours[name] == theirs[name] <= 5
    rest = set(ours.values()) - set(range(1, 6))
    assert not rest & set(theirs.values())
