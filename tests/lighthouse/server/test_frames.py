"""What goes to many sessions is serialised once, and each reads its own."""

from lighthouse.server.services import SessionFrames
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import JoinAccepted, QuorumChanged, ToManager
from lighthouse_protocol.rules.quorum_change import NamedQuorum, change_between
from lighthouse_protocol.wire.streams import SESSION_RESPONSES

SECRET = "known to the members of that quorum"


def quorum(quorum_id: int) -> NamedQuorum:
    return NamedQuorum.of(Quorum(quorum_id, tuple(Participant(f"g{at:03}", step=quorum_id) for at in range(100))))


def read(body: tuple[bytes, ...] | bytes) -> ToManager | None:
    whole = body if isinstance(body, bytes) else b"".join(body)
    return SESSION_RESPONSES.read(SESSION_RESPONSES.schema.FromString(whole))


def test_a_quorum_and_a_change_of_it_are_each_serialised_once_though_they_alternate():
    frames, new = SessionFrames(), quorum(2)
    change = change_between(quorum(1).quorum, new)
    assert change is not None
    shared: set[int] = set()
    for join in range(1, 6):
        for message in (JoinAccepted(join, new.quorum, True, SECRET), QuorumChanged(join, change, True, SECRET)):
            body = frames.encode(message)
            assert read(body) == message
            assert isinstance(body, tuple)
            shared.add(id(body[0]))
            assert len(body[1]) < 16
    assert len(shared) == 2
    assert len(frames.encode(QuorumChanged(1, change, True, SECRET))[0]) < 400


def test_the_next_change_is_not_the_last_one():
    frames = SessionFrames()
    for number in (2, 3):
        change = change_between(quorum(number - 1).quorum, quorum(number))
        assert change is not None
        assert read(frames.encode(QuorumChanged(7, change, False, SECRET))) == QuorumChanged(7, change, False, SECRET)
