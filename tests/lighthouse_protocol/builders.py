"""Participants and messages drawn by hypothesis; fields that nobody knows."""

from hypothesis import strategies as st

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_DATA_BYTES, MAX_GROUP_WORLD_SIZE, MAX_QUORUM_ID, cut_reason
from lighthouse_protocol.messages.membership import Assignment, Distrust, DistrustKind, Participant, World
from lighthouse_protocol.pb.torchft import torchft_pb2

UUID = "01234567-89ab-cdef-0123-456789abcdef"

names = st.text("abcXYZ019._:/@+=-", min_size=1, max_size=12).filter(lambda text: bool(check_name(text)))
hosts = st.sampled_from(["node-7", "10.0.0.1", "127.0.0.1", "localhost", "[::1]", "[fd00::7]", "a.b.example"])
addresses = st.just("") | st.builds("{}{}:{}".format, st.sampled_from(["", "http://"]), hosts, st.integers(0, 65535))
counts = st.integers(0, 2**53)
data = st.text(max_size=20).filter(lambda text: len(text.encode()) <= MAX_DATA_BYTES)
shared = {
    "address": addresses,
    "store_address": addresses,
    "step": counts,
    "shrink_only": st.booleans(),
    "commit_failures": counts,
    "data": data,
}
native_participants = st.builds(
    Participant,
    replica_id=names,
    incarnation=names,
    group_world_size=st.integers(1, MAX_GROUP_WORLD_SIZE),
    tag_quorum_id=st.none() | st.integers(0, MAX_QUORUM_ID),
    seen_quorum_id=st.integers(0, MAX_QUORUM_ID),
    works_at=st.none() | counts,
    heals_first=st.none() | st.booleans(),
    **dict.fromkeys(
        ("ranks_disagree", "watched", "catch_up", "has_source", "resolves_to_loopback", "compares", "continues"),
        st.booleans(),
    ),
    distrust=st.none() | st.builds(Distrust, st.sampled_from(DistrustKind), st.text(max_size=20).map(cut_reason)),
    **shared,
)
torchft_members = st.builds(
    torchft_pb2.QuorumMember,
    replica_id=names | st.just(f"train_ddp_0:{UUID}"),
    world_size=st.integers(0, MAX_GROUP_WORLD_SIZE),
    reconfigure_handles=st.lists(st.text(max_size=5), max_size=3),
    **shared,
)
reasons = st.text(st.characters(codec="utf-8"), max_size=20).map(cut_reason)
worlds = st.builds(World, counts, counts, counts, counts, counts, st.lists(names, max_size=3).map(tuple), reasons)
assignments = st.builds(
    Assignment,
    quorum_id=counts,
    replica_rank=st.integers(0, 9),
    replica_world_size=st.integers(1, 9),
    replica_ids=st.lists(names, max_size=3).map(tuple),
    store_address=addresses,
    max_step=counts,
    max_rank=st.none() | st.integers(0, 9),
    max_world_size=st.integers(1, 9),
    contributors=st.integers(1, 9),
    primary_address=addresses,
    serve_to=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    commit_failures=counts,
    revoked=st.booleans(),
    catching_up=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    tag_quorum_id=st.none() | counts,
    world=st.none() | worlds,
    compares=st.booleans(),
    place=st.none() | st.integers(0, 9),
    healing=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


def field(number: int, value: bytes | int) -> bytes:
    """One field on the wire: length-delimited for bytes, a varint for a number."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
