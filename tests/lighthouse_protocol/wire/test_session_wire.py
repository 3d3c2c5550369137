"""What is said on a session and on a watch, there and back; what is checked of it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.constraints import MAX_TEXT_CHARS
from lighthouse_protocol.identity import split_replica_id
from lighthouse_protocol.limits import (
    MAX_GROUP_WORLD_SIZE,
    MAX_QUORUM_ID,
    MAX_REASON_CHARS,
    MAX_REQUEST_BYTES,
    MAX_SECONDS,
)
from lighthouse_protocol.messages import session as said
from lighthouse_protocol.messages.evidence import RankEvidence, SelfReport
from lighthouse_protocol.messages.membership import Assignment, Participant, Quorum, Vote
from lighthouse_protocol.messages.progress import GroupView, OpenPhase, RankName, RankView, Sample
from lighthouse_protocol.messages.session import (
    HoldState,
    JoinAccepted,
    JoinRejected,
    QuorumOrder,
    QuorumPhase,
    ToLighthouse,
    ToManager,
    ToRank,
    WatchRequest,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.refusals import Drained, InvalidRequest, LighthouseError, Superseded, WrongState
from lighthouse_protocol.wire.documented import vote_from_native, vote_to_native
from lighthouse_protocol.wire.session_wire import (
    handed_for,
    handed_shared,
    order_bytes,
    session_request_from_wire,
    session_request_to_wire,
    session_response_from_wire,
    session_response_to_wire,
)
from lighthouse_protocol.wire.watch_wire import (
    ballot_from_wire,
    watch_request_from_wire,
    watch_request_to_wire,
    watch_response_from_wire,
    watch_response_to_wire,
    word_from_wire,
)
from tests.lighthouse_protocol.builders import assignments, field, native_participants, reasons, worlds
from tests.lighthouse_protocol.wire.test_progress_wire import names, samples

ToLighthouseMessage = lighthouse_pb2.SessionRequest
ToManagerMessage = lighthouse_pb2.SessionResponse

counts = st.integers(0, 2**53)
quorum_ids = st.integers(0, MAX_QUORUM_ID)
seconds = st.floats(1e-9, MAX_SECONDS)
members = native_participants.filter(lambda p: split_replica_id(p.wire_id)[1] != p.incarnation)

group_views = st.builds(
    GroupView,
    st.just("g"),
    names,
    st.builds(
        lambda found: tuple(RankView(RankName("g", n), sample, 1.0) for n, sample in enumerate(found)),
        st.lists(samples, max_size=2),
    ),
    st.lists(st.tuples(names, seconds), max_size=2).map(tuple),
)
group_ranks = st.integers(0, MAX_GROUP_WORLD_SIZE - 1)
some_texts = st.lists(reasons, max_size=2).map(tuple)
evidences = st.builds(
    RankEvidence,
    group_ranks,
    reasons,
    counts,
    reasons,
    *[reasons] * 3,
    some_texts,
    some_texts,
    st.floats(0, 1e6),
)
own_evidences = st.builds(SelfReport, counts, reasons, reasons, some_texts)
helds = st.builds(said.HeldQuorum, quorum_ids, st.sampled_from(HoldState), counts, st.booleans())
levels = st.builds(said.GroupReport, st.none() | helds, st.booleans(), reasons, st.frozensets(group_ranks, max_size=3))
orders = st.builds(QuorumOrder, quorum_ids, st.sampled_from(QuorumPhase), counts, reasons)
to_lighthouse = st.one_of(
    st.builds(said.Hello, members, levels, st.booleans(), st.booleans()),
    st.builds(said.Heartbeat, counts, levels, st.none() | group_views),
    st.builds(said.JoinRequest, counts, members, seconds),
    st.builds(said.WithdrawRequest, counts),
    st.builds(said.Leave, reasons),
    st.builds(said.Evidence, counts, evidences),
    st.builds(said.EvidenceDone, counts),
)
quorums = st.builds(Quorum, quorum_ids, st.lists(members, max_size=3).map(tuple))
to_manager = st.one_of(
    st.builds(said.Welcome, seconds, seconds, st.none() | orders),
    st.builds(said.HeartbeatAck, counts, seconds, st.none() | orders),
    st.builds(JoinAccepted, counts, quorums, st.booleans()),
    orders,
    st.builds(said.DrainRequest, reasons),
    st.builds(said.KillRequest, reasons),
    st.builds(said.Goodbye, reasons),
    st.builds(said.EvidenceRequest, counts, st.lists(group_ranks, max_size=3).map(tuple)),
    worlds,
)
to_rank = st.one_of(
    st.builds(said.WatchOpened, st.booleans(), st.booleans()),
    st.builds(said.RankGone, counts, reasons),
    st.builds(said.Revoked, quorum_ids, reasons),
    st.builds(said.Killed, reasons),
    st.builds(said.Waiting, reasons),
    st.builds(said.EvidenceAsked, counts),
    worlds,
    st.builds(said.Counted, counts, st.builds(Vote, st.booleans(), st.none() | assignments)),
)
ballots = st.builds(
    said.Ballot, counts, counts, st.booleans(), st.none() | quorum_ids, st.booleans(), st.floats(0.001, 1e6)
)
watch_requests = st.builds(
    WatchRequest,
    st.integers(0, MAX_GROUP_WORLD_SIZE - 1),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    counts,
    reasons,
    counts,
    reasons,
    st.none() | st.builds(said.EvidenceOffer, st.integers(0, 64), counts),
    st.booleans(),
)


class TestThereAndBack:
    @given(to_lighthouse)
    def test_to_the_lighthouse(self, message: ToLighthouse):
        body = session_request_to_wire(message).SerializeToString()
        assert session_request_from_wire(ToLighthouseMessage.FromString(body)) == message

    @given(to_manager)
    def test_to_a_manager(self, message: ToManager):
        body = session_response_to_wire(message, created_at=1.0).SerializeToString()
        assert session_response_from_wire(ToManagerMessage.FromString(body)) == message

    @given(watch_requests)
    def test_a_watch(self, request: WatchRequest):
        body = watch_request_to_wire(request).SerializeToString()
        assert watch_request_from_wire(manager_pb2.WatchRequest.FromString(body)) == request

    @given(ballots)
    def test_a_ballot(self, ballot: said.Ballot):
        body = watch_request_to_wire(ballot).SerializeToString()
        assert ballot_from_wire(manager_pb2.WatchRequest.FromString(body)) == ballot

    @given(st.one_of(ballots, samples, own_evidences, st.builds(said.Leaving, st.none() | counts)))
    def test_what_a_rank_says_later(self, word: said.Ballot | Sample | SelfReport | said.Leaving):
        body = watch_request_to_wire(word).SerializeToString()
        assert word_from_wire(manager_pb2.WatchRequest.FromString(body)) == word

    @pytest.mark.parametrize("kind", [LighthouseError, *LighthouseError.__subclasses__()])
    def test_a_ballot_that_is_refused(self, kind: type[LighthouseError]):
        read = watch_response_from_wire(watch_response_to_wire(said.Counted(3, kind("step: is odd"))))
        assert isinstance(read, said.Counted)
        assert (read.number, type(read.outcome), str(read.outcome)) == (3, kind, "step: is odd")

    @given(to_rank)
    def test_to_a_rank(self, message: ToRank):
        body = watch_response_to_wire(message).SerializeToString()
        assert watch_response_from_wire(manager_pb2.WatchResponse.FromString(body)) == message

    @given(st.booleans(), st.none() | assignments)
    def test_a_vote_with_the_next_grant(self, commit: bool, next_: Assignment | None):
        body = vote_to_native(commit, next_).SerializeToString()
        assert vote_from_native(manager_pb2.ShouldCommitResponse.FromString(body)) == Vote(commit, next_)

    @pytest.mark.parametrize("kind", [LighthouseError, *LighthouseError.__subclasses__()])
    def test_a_refusal_is_what_it_was(self, kind: type[LighthouseError]):
        read = session_response_from_wire(session_response_to_wire(JoinRejected(3, kind("step: is odd"))))
        assert isinstance(read, JoinRejected)
        assert (read.join, type(read.error), str(read.error)) == (3, kind, "step: is odd")


class TestSerialisedOnce:
    """What all sessions are sent."""

    @given(quorums, st.booleans(), counts)
    def test_a_quorum(self, quorum: Quorum, stands: bool, join: int):
        body = handed_for(handed_shared(quorum, stands, 12.5), join)
        message = ToManagerMessage.FromString(body)
        assert session_response_from_wire(message) == JoinAccepted(join, quorum, stands)
        assert (message.handed.quorum.created.seconds, message.handed.quorum.created.nanos) == (12, 500_000_000)

    def test_only_a_few_bytes_are_added_for_a_session(self):
        shared = handed_shared(Quorum(7, tuple(Participant(f"g{i}") for i in range(100))), True, 1.0)
        own = handed_for(shared, 12345)
        assert own.startswith(shared)
        assert len(own) - len(shared) < 16

    @given(orders)
    def test_an_order(self, order: QuorumOrder):
        assert session_response_from_wire(ToManagerMessage.FromString(order_bytes(order))) == order


class TestNewerPeers:
    def test_what_is_not_known_is_skipped(self):
        assert session_request_from_wire(ToLighthouseMessage.FromString(field(99, b""))) is None
        assert session_response_from_wire(ToManagerMessage.FromString(field(99, b""))) is None
        assert watch_response_from_wire(manager_pb2.WatchResponse.FromString(field(99, b""))) is None

    def test_where_a_rank_is_that_cannot_be_read_ends_nothing(self):
        unreadable = {"phases": [{"name": "n" * 999}]}
        assert word_from_wire(manager_pb2.WatchRequest(progress=unreadable)) is None
        ranks = {"replica_id": "g", "ranks": [{"sample": unreadable}]}
        assert session_request_from_wire(request(beat={"number": 3, "progress": ranks})) == said.Heartbeat(3)

    def test_evidence_that_cannot_be_read_ends_nothing(self):
        assert word_from_wire(manager_pb2.WatchRequest(evidence={"number": -1})) is None
        for rank in ({"group_rank": -1}, {"took_s": math.nan}, {"host": "h" * 999}):
            assert session_request_from_wire(request(evidence={"number": 3, "rank": rank})) is None

    def test_older_peers_give_no_evidence(self):
        read = session_request_from_wire(request(hello={"participant": {"replica_id": "g", "world_size": 1}}))
        assert isinstance(read, said.Hello)
        assert not read.gives_evidence
        assert watch_request_from_wire(manager_pb2.WatchRequest(worker="w")).offer is None

    def test_an_older_manager_takes_no_progress(self):
        assert watch_response_from_wire(manager_pb2.WatchResponse(opened={})) == said.WatchOpened(False)

    def test_a_refusal_of_an_unknown_kind_is_a_plain_one(self):
        for kind in ("TooHot", "Enum", "annotations", ""):
            message = ToManagerMessage(refused=lighthouse_pb2.Refused(join=1, kind=kind, text="why"))
            read = session_response_from_wire(message)
            assert isinstance(read, JoinRejected)
            assert (type(read.error), str(read.error)) == (LighthouseError, "why")

    def test_a_more_special_refusal_goes_as_its_kind(self):
        class StepInFlight(WrongState):
            pass

        assert session_response_to_wire(JoinRejected(1, StepInFlight("x"))).refused.kind == "WrongState"


def request(**fields: Any) -> lighthouse_pb2.SessionRequest:
    return ToLighthouseMessage(**fields)


def beat(**fields: Any) -> lighthouse_pb2.SessionRequest:
    held = {"quorum_id": 1, "mode": 1, "granted": 1} | fields
    return request(beat={"number": 1, "levels": {"held": held}})


def join(**fields: Any) -> lighthouse_pb2.SessionRequest:
    member = lighthouse_pb2.QuorumMember(replica_id="a", incarnation="i", world_size=1)
    return request(join={"number": 1, "participant": member, "time_left_s": 1.0} | fields)


def response(**fields: Any) -> lighthouse_pb2.SessionResponse:
    return ToManagerMessage(**fields)


def order(**fields: Any) -> dict[str, Any]:
    return {"quorum_id": 1, "phase": 3, "upto": 1} | fields


def watch(**fields: Any) -> manager_pb2.WatchRequest:
    good: dict[str, Any] = {"rank": 1, "worker": "w", "pid": 1, "host": "h", "started": 1}
    return manager_pb2.WatchRequest(**(good | fields))


def told(**fields: Any) -> manager_pb2.WatchResponse:
    return manager_pb2.WatchResponse(**fields)


NOT_SECONDS = (0.0, -1.0, math.inf, -math.inf, math.nan)
NOT_IDS = (-1, MAX_QUORUM_ID + 1)


class TestBadInput:
    """A violation names the field."""

    def test_what_the_examples_here_are_made_of_is_good(self):
        for good in (beat(), join()):
            assert session_request_from_wire(good) is not None
        assert session_response_from_wire(response(order=order())) is not None
        assert watch_request_from_wire(watch()).worker == "w"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("number", request(beat={"number": -1})),
            ("number", request(withdraw={"number": -1})),
            ("number", join(number=-1)),
            *(("quorum_id", beat(quorum_id=value)) for value in NOT_IDS),
            *(("mode", beat(mode=value)) for value in (0, 7, 99)),
            ("granted", beat(granted=-1)),
            *(("time_left_s", join(time_left_s=value)) for value in NOT_SECONDS),
            ("participant", request(hello={})),
            ("participant", request(join={"number": 1, "time_left_s": 1.0})),
            ("replica_id", request(hello={"participant": {"replica_id": "a b"}})),
            ("replica_id", join(participant={"replica_id": ""})),
            ("address", join(participant={"replica_id": "a", "world_size": 1, "address": "0.0.0.0:1"})),
            ("world_size", join(participant={"replica_id": "a"})),
            ("tag_quorum_id", join(participant={"replica_id": "a", "world_size": 1, "tag_quorum_id": -1})),
        ],
    )
    def test_to_the_lighthouse(self, name: str, message: lighthouse_pb2.SessionRequest):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            session_request_from_wire(message)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            *(
                ("heartbeat_interval_s", response(welcome={"heartbeat_interval_s": s, "lease_s": 1}))
                for s in NOT_SECONDS
            ),
            *(("lease_s", response(welcome={"heartbeat_interval_s": 1, "lease_s": s})) for s in NOT_SECONDS),
            *(("heartbeat_interval_s", response(echo={"heartbeat_interval_s": s})) for s in NOT_SECONDS),
            ("number", response(echo={"number": -1, "heartbeat_interval_s": 1})),
            *(("quorum_id", response(order=order(quorum_id=value))) for value in NOT_IDS),
            *(("phase", response(order=order(phase=value))) for value in (0, 7, 99)),
            ("upto", response(order=order(upto=-1))),
            ("phase", response(echo={"heartbeat_interval_s": 1, "order": order(phase=0)})),
            ("phase", response(welcome={"heartbeat_interval_s": 1, "lease_s": 1, "order": order(phase=0)})),
            ("join", response(handed={"join": -1, "quorum": {}})),
            ("quorum", response(handed={"join": 1})),
            *(("quorum_id", response(handed={"quorum": {"quorum_id": value}})) for value in NOT_IDS),
            ("replica_id", response(handed={"quorum": {"participants": [{"replica_id": "a b"}]}})),
            ("incarnation", response(handed={"quorum": {"participants": [{"replica_id": "a", "incarnation": "b c"}]}})),
            ("join", response(refused={"join": -1})),
        ],
    )
    def test_to_a_manager(self, name: str, message: lighthouse_pb2.SessionResponse):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            session_response_from_wire(message)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("rank", -1),
            ("rank", MAX_GROUP_WORLD_SIZE),
            ("worker", ""),
            ("worker", "w" * (MAX_TEXT_CHARS + 1)),
            ("host", "h" * (MAX_TEXT_CHARS + 1)),
            ("hostname", "h" * (MAX_TEXT_CHARS + 1)),
            ("pid", -1),
            ("started", -1),
        ],
    )
    def test_of_a_watch(self, name: str, value: object):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            watch_request_from_wire(watch(**{name: value}))

    def test_a_ballot_that_is_none(self):
        with pytest.raises(InvalidRequest, match="^ballot: is missing"):
            ballot_from_wire(watch())

    @pytest.mark.parametrize("time_left_s", [0.0, -1.0, math.nan, math.inf])
    def test_a_ballot_without_a_deadline(self, time_left_s: float):
        with pytest.raises(InvalidRequest, match="^time_left_s: "):
            ballot_from_wire(manager_pb2.WatchRequest(ballot=manager_pb2.Ballot(time_left_s=time_left_s)))

    @pytest.mark.parametrize("quorum_id", NOT_IDS)
    def test_to_a_rank(self, quorum_id: int):
        with pytest.raises(InvalidRequest, match=r"^quorum_id: "):
            watch_response_from_wire(told(revoked={"quorum_id": quorum_id}))


class TestTooManyRanks:
    """A beat is below the limit of a request, whatever its group looks like."""

    @pytest.mark.parametrize(("count", "told"), [(10, 10), (700, 700), (9000, 0)])
    def test_for_a_beat(self, count: int, told: int):
        here = Sample(phases=(OpenPhase("step"), OpenPhase("validation", 3, 25)), entered=(("é" * 60, 1),) * 8)
        view = GroupView("g", "i", tuple(RankView(RankName("g", n), here, 1.0) for n in range(count)))
        body = session_request_to_wire(said.Heartbeat(1, progress=view)).SerializeToString()
        assert len(body) <= MAX_REQUEST_BYTES, MAX_SECONDS
        read = session_request_from_wire(ToLighthouseMessage.FromString(body))
        assert isinstance(read, said.Heartbeat)
        assert len(read.progress.ranks if read.progress is not None else ()) == told


LONG, CUT = "x" * (MAX_REASON_CHARS + 1), "x" * (MAX_REASON_CHARS - 3) + "..."


class TestReasonsAreCut:
    """By who writes and by who reads: neither trusts the other."""

    @pytest.mark.parametrize("text", [LONG, "x" * MAX_REASON_CHARS])
    def test_written(self, text: str):
        cut = CUT if text == LONG else text
        assert session_request_to_wire(said.Leave(text)).leave.reason == cut
        assert session_request_to_wire(said.Heartbeat(1, said.GroupReport(down=text))).beat.levels.down == cut
        assert session_response_to_wire(JoinRejected(1, Drained(text))).refused.text == cut
        assert session_response_to_wire(QuorumOrder(1, QuorumPhase.REVOKED, reason=text)).order.reason == cut
        assert session_response_to_wire(said.DrainRequest(text)).drain.reason == cut
        assert session_response_to_wire(said.KillRequest(text)).kill.reason == cut
        assert session_response_to_wire(said.Goodbye(text)).goodbye.reason == cut
        assert watch_response_to_wire(said.Revoked(1, text)).revoked.reason == cut
        assert watch_response_to_wire(said.Killed(text)).killed.reason == cut

    def test_read(self):
        assert session_request_from_wire(request(leave={"reason": LONG})) == said.Leave(CUT)
        read = session_request_from_wire(request(beat={"levels": {"down": LONG}}))
        assert read == said.Heartbeat(0, said.GroupReport(down=CUT))
        read = session_response_from_wire(response(refused={"kind": "Superseded", "text": LONG}))
        assert isinstance(read, JoinRejected)
        assert (type(read.error), str(read.error)) == (Superseded, CUT)
        assert session_response_from_wire(response(order=order(reason=LONG))) == QuorumOrder(
            1, QuorumPhase.STANDING, 1, CUT
        )
        assert session_response_from_wire(response(drain={"reason": LONG})) == said.DrainRequest(CUT)
        assert session_response_from_wire(response(kill={"reason": LONG})) == said.KillRequest(CUT)
        assert session_response_from_wire(response(goodbye={"reason": LONG})) == said.Goodbye(CUT)
        read = watch_response_from_wire(told(revoked={"reason": LONG}))
        assert read == said.Revoked(0, CUT)
        read = watch_response_from_wire(told(killed={"reason": LONG}))
        assert read == said.Killed(CUT)


def test_every_mode_and_phase_has_its_number():
    assert {f"HOLD_MODE_{mode.name}" for mode in HoldState} | {"HOLD_MODE_UNSPECIFIED"} == set(
        lighthouse_pb2.HoldMode.keys()
    )
    assert {f"PHASE_{phase.name}" for phase in QuorumPhase} | {"PHASE_UNSPECIFIED"} == set(lighthouse_pb2.Phase.keys())
