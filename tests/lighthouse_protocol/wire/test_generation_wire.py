"""What is said on a rank's stream survives the wire; what is malformed is refused with its field."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.run import (
    Counters,
    Done,
    Failure,
    Finish,
    FromRunRank,
    Over,
    RankHeartbeat,
    RankHello,
    RankId,
    Ready,
    Refusal,
    Stop,
    Terms,
    Told,
    ToRunRank,
    Welcome,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import DuplicateReplica, InvalidRequest, LighthouseError
from lighthouse_protocol.wire.generation_wire import (
    rank_request_from_wire,
    rank_request_to_wire,
    rank_response_from_wire,
    rank_response_to_wire,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.integers(0, 2**53)
counts = st.integers(1, 1000)
texts = st.text(max_size=40).map(cut_reason)
timeouts = st.floats(0.001, 3600.0)
terms = st.builds(
    Terms,
    world_size=counts,
    active=st.none() | counts,
    min_active=st.just(1),
    divisible_by=st.just(1),
    hosts_together=st.booleans(),
    stride=st.sampled_from([1, 100]),
    join_timeout_s=timeouts,
    return_timeout_s=timeouts,
    max_iterations=st.none() | counts,
)
entries = st.builds(
    RankHello,
    rank=st.builds(RankId, st.integers(0, 1000), st.text("abc0123-", min_size=1, max_size=20)),
    terms=terms,
    attempt=st.integers(0, 1000),
    host=texts,
    pid=numbers,
    generation=st.none() | numbers,
    is_ready=st.booleans(),
    seen=st.none() | numbers,
    step=numbers,
)
requests = st.one_of(
    entries,
    st.builds(RankHeartbeat, numbers, texts),
    st.builds(Ready, st.none() | numbers),
    st.builds(Failure, numbers, texts),
    st.builds(Finish, numbers),
)
responses = st.one_of(
    st.builds(
        Told,
        st.builds(Counters, numbers, numbers, numbers, numbers),
        st.lists(st.integers(0, 2**32 - 1)).map(tuple),
    ),
    st.builds(Over, numbers, texts),
    st.builds(Stop, texts, texts, st.integers(-1, 2**53)),
    st.builds(Done, numbers),
    st.just(Welcome()),
)


@unhurried
@given(requests)
def test_a_request_survives(message: FromRunRank):
    raw = rank_request_to_wire(message).SerializeToString()
    assert rank_request_from_wire(pb.RankRequest.FromString(raw)) == message


@unhurried
@given(responses)
def test_a_response_survives(message: ToRunRank):
    raw = rank_response_to_wire(message).SerializeToString()
    assert rank_response_from_wire(pb.RankResponse.FromString(raw)) == message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DuplicateReplica("slot: taken"), DuplicateReplica),
        (InvalidRequest("is -1", field="slot"), InvalidRequest),
        (type("Newer", (DuplicateReplica,), {})("x"), DuplicateReplica),
    ],
)
def test_a_refusal_survives(error: LighthouseError, kind: type[LighthouseError]):
    read = rank_response_from_wire(rank_response_to_wire(Refusal(error)))
    assert isinstance(read, Refusal)
    assert (type(read.error), str(read.error)) == (kind, str(error))


def test_a_refusal_of_a_newer_lighthouse_is_a_plain_one():
    read = rank_response_from_wire(pb.RankResponse(refusal=pb.RankRefusal(kind="Unheard", text="no")))
    assert isinstance(read, Refusal)
    assert type(read.error) is LighthouseError


def test_what_is_not_known_is_skipped():
    assert rank_request_from_wire(pb.RankRequest()) is None
    assert rank_response_from_wire(pb.RankResponse()) is None


def entry(**terms: object) -> pb.RankRequest:
    message = rank_request_to_wire(RankHello(RankId(0, "a"), Terms(world_size=8)))
    for name, value in terms.items():
        setattr(message.entry.terms, name, value)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.RankRequest(entry=pb.RankEntry(incarnation="a")), "terms"),
        (pb.RankRequest(entry=pb.RankEntry(terms=pb.RunTerms())), "incarnation"),
        (pb.RankRequest(beat=pb.RankBeat(step=-1)), "step"),
        (pb.RankRequest(beat=pb.RankBeat(phase="x" * 513)), "phase"),
        (pb.RankRequest(ready=pb.RankReady(generation=-1)), "generation"),
        (pb.RankRequest(failure=pb.RankFailure(generation=-1)), "generation"),
        (pb.RankRequest(finish=pb.RankFinish(generation=2**53 + 1)), "generation"),
        (entry(world_size=0), "world_size"),
        (entry(active=0), "active"),
        (entry(stride=0), "stride"),
        (entry(min_active=9), "min_active"),
        (entry(divisible_by=3, min_active=7), "min_active"),
        (entry(divisible_by=0), "divisible_by"),
        (entry(join_timeout_s=0.0), "join_timeout_s"),
        (entry(return_timeout_s=float("inf")), "return_timeout_s"),
    ],
)
def test_a_malformed_request_is_refused(message: pb.RankRequest, field: str):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        rank_request_from_wire(message)
