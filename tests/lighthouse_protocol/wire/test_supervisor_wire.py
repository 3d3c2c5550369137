"""What is said on a supervisor's stream survives the wire; what is malformed is refused with its field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, MAX_OUTPUT_CHARS, MAX_OUTPUT_LINES
from lighthouse_protocol.messages.run import Done, RankId, Refusal, Stop
from lighthouse_protocol.messages.supervisor import (
    FromSupervisor,
    HostExcluded,
    ProcessLost,
    StopAsked,
    SupervisorHeartbeat,
    SupervisorHello,
    SupervisorWelcome,
    ToSupervisor,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, WrongState
from lighthouse_protocol.wire.supervisor_wire import (
    supervisor_request_from_wire,
    supervisor_request_to_wire,
    supervisor_response_from_wire,
    supervisor_response_to_wire,
)
from tests.lighthouse_protocol.wire.test_generation_wire import numbers, texts, timeouts, unhurried

names = st.text("abc0123-/", min_size=1, max_size=20)
slots = st.integers(0, MAX_GROUP_WORLD_SIZE - 1)
requests = st.one_of(
    st.builds(SupervisorHello, names, names, texts, st.lists(slots, max_size=8).map(tuple)),
    st.just(SupervisorHeartbeat()),
    st.builds(ProcessLost, st.builds(RankId, slots, names), texts, st.lists(texts, max_size=8).map(tuple)),
    st.builds(StopAsked, texts),
    st.builds(HostExcluded, texts),
)
responses = st.one_of(
    st.builds(SupervisorWelcome, timeouts),
    st.builds(Stop, texts, texts, st.integers(-1, 2**53)),
    st.builds(Done, numbers),
)


@unhurried
@given(requests)
def test_a_request_survives(message: FromSupervisor):
    raw = supervisor_request_to_wire(message).SerializeToString()
    assert supervisor_request_from_wire(pb.SupervisorRequest.FromString(raw)) == message


@unhurried
@given(responses)
def test_a_response_survives(message: ToSupervisor):
    raw = supervisor_response_to_wire(message).SerializeToString()
    assert supervisor_response_from_wire(pb.SupervisorResponse.FromString(raw)) == message


def test_a_refusal_survives():
    read = supervisor_response_from_wire(supervisor_response_to_wire(Refusal(WrongState("host: excluded"))))
    assert isinstance(read, Refusal)
    assert (type(read.error), str(read.error)) == (WrongState, "host: excluded")


def test_a_refusal_of_a_newer_lighthouse_is_a_plain_one():
    read = supervisor_response_from_wire(pb.SupervisorResponse(refusal=pb.RankRefusal(kind="Unheard", text="no")))
    assert isinstance(read, Refusal)
    assert type(read.error) is LighthouseError


def test_what_is_not_known_is_skipped():
    assert supervisor_request_from_wire(pb.SupervisorRequest()) is None
    assert supervisor_response_from_wire(pb.SupervisorResponse()) is None


def test_of_a_long_output_the_end_is_kept():
    lines = tuple(f"{number}" for number in range(MAX_OUTPUT_LINES + 10))
    lost = ProcessLost(RankId(0, "a"), "exit code 1", (*lines, "x" * 1000))
    read = supervisor_request_from_wire(supervisor_request_to_wire(lost))
    assert isinstance(read, ProcessLost)
    assert read.output == (*lines[11:], "x" * MAX_OUTPUT_CHARS)


def test_a_long_output_is_cut_by_its_reader_too():
    message = pb.SupervisorRequest(lost=pb.WorkerLost(incarnation="a", output=["y" * 999] * 999))
    read = supervisor_request_from_wire(message)
    assert isinstance(read, ProcessLost)
    assert read.output == ("y" * MAX_OUTPUT_CHARS,) * MAX_OUTPUT_LINES


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(incarnation="a")), "name"),
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(name="a b", incarnation="a")), "name"),
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(name="a")), "incarnation"),
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(name="a", incarnation="a", host="x" * 513)), "host"),
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(name="a", incarnation="a", slots=[65536])), "slot"),
        (pb.SupervisorRequest(entry=pb.SupervisorEntry(name="a", incarnation="a", slots=[0] * 65537)), "slots"),
        (pb.SupervisorRequest(lost=pb.WorkerLost(slot=65536, incarnation="a")), "slot"),
        (pb.SupervisorRequest(lost=pb.WorkerLost(slot=1)), "incarnation"),
    ],
)
def test_a_malformed_request_is_refused(message: pb.SupervisorRequest, field: str):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        supervisor_request_from_wire(message)


def test_a_beat_interval_is_a_length_of_time():
    with pytest.raises(InvalidRequest, match=r"^beat_interval_s: "):
        supervisor_response_from_wire(pb.SupervisorResponse(welcome=pb.SupervisorWelcome()))
