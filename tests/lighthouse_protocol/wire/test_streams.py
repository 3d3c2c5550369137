"""What the types of fields do not say of streams: shared frames, refusals as values, heartbeats that are too big."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_REASON_CHARS, MAX_REQUEST_BYTES
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.progress import GroupView, OpenPhase, PhaseCount, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.session import Heartbeat, JoinAccepted, JoinRejected, VoteAnswer
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.refusals import Drained, InvalidRequest, LighthouseError, Superseded, WrongState
from lighthouse_protocol.wire.streams import (
    SESSION_REQUESTS,
    SESSION_RESPONSES,
    WATCH_RESPONSES,
    accepted_for,
    accepted_shared,
)
from tests.lighthouse_protocol.drawn import messages

SECRET = "known to the members of that quorum"


class TestAcceptedSerialisedOnce:
    @given(messages(Quorum), st.booleans(), st.integers(0, 2**53))
    def test_for_all_sessions(self, quorum: Quorum, stands: bool, join: int):
        message = lighthouse_pb2.SessionResponse.FromString(
            accepted_for(accepted_shared(quorum, stands, 12.5, SECRET), join)
        )
        assert SESSION_RESPONSES.read(message) == JoinAccepted(join, quorum, stands, SECRET)
        created = message.join_accepted.quorum.created
        assert (created.seconds, created.nanos) == (12, 500_000_000)

    def test_only_a_few_bytes_are_added_for_a_session(self):
        shared = accepted_shared(Quorum(7, tuple(Participant(f"g{i}") for i in range(100))), True, 1.0)
        own = accepted_for(shared, 12345)
        assert own.startswith(shared)
        assert len(own) - len(shared) < 16


class TestDeflated:
    LONG = Quorum(7, tuple(Participant(f"g{i}", address=f"10.0.0.{i}:29512") for i in range(200)))

    def test_a_long_quorum_is_a_third_as_long_and_read_like_any_other(self):
        plain = SESSION_RESPONSES.write(JoinAccepted(3, self.LONG, True, SECRET)).SerializeToString()
        own = accepted_for(accepted_shared(self.LONG, True, 0.0, SECRET), 3)
        assert 3 * len(own) < len(plain)
        message = lighthouse_pb2.SessionResponse.FromString(own)
        assert SESSION_RESPONSES.read(message) == JoinAccepted(3, self.LONG, True, SECRET)

    def test_a_short_one_is_not(self):
        shared = accepted_shared(Quorum(7, (Participant("a"),)), True, 0.0)
        assert not lighthouse_pb2.SessionResponse.FromString(shared).deflated

    @pytest.mark.parametrize(
        ("deflated", "why"),
        [
            (b"no zlib", "deflated: cannot be read: Error -3"),
            (zlib.compress(b"\xff\xff no protobuf"), "deflated: cannot be read: "),
            (zlib.compress(bytes(1000))[:-8], "deflated: "),
            (
                zlib.compress(lighthouse_pb2.SessionResponse(deflated=bytes(70_000_000)).SerializeToString()),
                "deflated: ",
            ),
        ],
        ids=["other", "other inside", "cut", "a bomb"],
    )
    def test_what_cannot_be_read_is_refused(self, deflated: bytes, why: str):
        with pytest.raises(InvalidRequest, match=f"^{why}"):
            SESSION_RESPONSES.read(lighthouse_pb2.SessionResponse(deflated=deflated))


class TestRefusals:
    """That they keep their kind and words is in test_messages.py."""

    @pytest.mark.parametrize("kind", ["TooHot", "Enum", "annotations", ""])
    def test_of_an_unknown_kind_are_plain(self, kind: str):
        message = lighthouse_pb2.SessionResponse(join_rejected={"join": 1, "error": {"kind": kind, "text": "why"}})
        read = SESSION_RESPONSES.read(message)
        assert isinstance(read, JoinRejected)
        assert (type(read.error), str(read.error)) == (LighthouseError, "why")

    def test_a_more_special_one_goes_as_its_kind(self):
        class StepInFlight(WrongState):
            pass

        message = WATCH_RESPONSES.write(VoteAnswer(1, StepInFlight("x")))
        assert message == manager_pb2.WatchResponse(
            vote_answer={"number": 1, "refusal": {"kind": "WrongState", "text": "x"}}
        )

    def test_are_cut_by_writer_and_reader(self):
        long, cut = "x" * (MAX_REASON_CHARS + 1), "x" * (MAX_REASON_CHARS - 3) + "..."
        written = SESSION_RESPONSES.write(JoinRejected(1, Drained(long)))
        assert written == lighthouse_pb2.SessionResponse(
            join_rejected={"join": 1, "error": {"kind": "Drained", "text": cut}}
        )
        told = lighthouse_pb2.SessionResponse(join_rejected={"error": {"kind": "Superseded", "text": long}})
        read = SESSION_RESPONSES.read(told)
        assert isinstance(read, JoinRejected)
        assert (type(read.error), str(read.error)) == (Superseded, cut)


def test_a_decision_without_an_outcome_is_refused():
    with pytest.raises(InvalidRequest, match="^outcome: is missing"):
        WATCH_RESPONSES.read(manager_pb2.WatchResponse(vote_answer={"number": 1}))


@pytest.mark.parametrize(("count", "told"), [(10, 10), (700, 700), (9000, 0)])
def test_a_heartbeat_is_below_the_limit_of_a_request_whatever_its_group_looks_like(count: int, told: int):
    here = ProgressSample(
        phases=(OpenPhase("step"), OpenPhase("validation", 3, 25)), entered=(PhaseCount("é" * 60, 1),) * 8
    )
    view = GroupView("g", "i", tuple(RankView(RankName("g", n), here, 1.0) for n in range(count)))
    body = SESSION_REQUESTS.write(Heartbeat(1, progress=view)).SerializeToString()
    assert len(body) <= MAX_REQUEST_BYTES
    read = SESSION_REQUESTS.read(lighthouse_pb2.SessionRequest.FromString(body))
    assert isinstance(read, Heartbeat)
    assert len(read.progress.ranks if read.progress is not None else ()) == told
