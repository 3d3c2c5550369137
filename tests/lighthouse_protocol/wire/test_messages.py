"""Every message of every stream and call, by the types of its fields: there and back, refused, cut, skipped."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_args

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.constraints import MAX_TEXT_CHARS, EntryCount, Shortened
from lighthouse_protocol.limits import MAX_REASON_CHARS, MAX_SECONDS
from lighthouse_protocol.messages import hosts, incident, run, session, status
from lighthouse_protocol.messages.chaos import FaultOrder
from lighthouse_protocol.messages.incident import RankEvidence, SelfReport
from lighthouse_protocol.messages.membership import Distrust, DistrustKind
from lighthouse_protocol.messages.preemption import PreemptionNotice, PreemptionReport
from lighthouse_protocol.messages.progress import (
    GroupView,
    OpenPhase,
    PhaseSeconds,
    ProgressSample,
    RankName,
    RankView,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import streams
from lighthouse_protocol.wire.codec import (
    CODECS,
    DISTRUST,
    GATHERED,
    INCIDENT,
    KEYS,
    LIGHTHOUSE_STATUS,
    MANAGER_STATUS,
    RUN_STATUS,
    Codec,
)
from lighthouse_protocol.wire.streams import Stream
from tests.lighthouse.statuses import job, member, place
from tests.lighthouse.statuses import status as status_of
from tests.lighthouse_protocol.builders import field
from tests.lighthouse_protocol.drawn import HAND_WRITTEN, fields_of, messages, refused

STREAMS: list[tuple[Stream[Any], Any]] = [
    (streams.SESSION_REQUESTS, session.ToLighthouse),
    (streams.SESSION_RESPONSES, session.ToManager),
    (streams.WATCH_REQUESTS, session.FromRank),
    (streams.WATCH_RESPONSES, session.ToRank),
    (streams.RANK_REQUESTS, run.FromRunRank),
    (streams.RANK_RESPONSES, run.ToRunRank),
    (streams.SUPERVISOR_REQUESTS, run.FromSupervisor),
    (streams.SUPERVISOR_RESPONSES, run.ToSupervisor),
    (streams.NODE_REQUESTS, hosts.FromHost),
    (streams.NODE_RESPONSES, hosts.ToHost),
]
CALLS: list[tuple[Codec[Any, Any], type[Any]]] = [
    (INCIDENT, incident.Incident),
    (GATHERED, incident.Gathered),
    (LIGHTHOUSE_STATUS, status.LighthouseStatus),
    (MANAGER_STATUS, status.ManagerStatus),
    (RUN_STATUS, run.RunStatus),
    (KEYS, run.Keys),
]
WHOLE = [(stream, cls) for stream, union in STREAMS for cls in get_args(union)] + CALLS
PARTS = sorted(CODECS.keys() - HAND_WRITTEN, key=lambda cls: (cls.__module__, cls.__name__))
LONG = "out of memory\n2026-01-01T00:00:00Z E lighthouse: all is lost\r\x1b[2J\x85\u2028." * 1000

every_whole = pytest.mark.parametrize(("codec", "cls"), [pytest.param(*one, id=one[1].__name__) for one in WHOLE])
every_part = pytest.mark.parametrize("cls", PARTS, ids=lambda cls: cls.__name__)
every_stream = pytest.mark.parametrize("stream", [stream for stream, _ in STREAMS], ids=lambda s: s.schema.__name__)
unhurried = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
few = settings(unhurried, max_examples=4)


@every_whole
@unhurried
@given(data=st.data())
def test_there_and_back_though_a_newer_version_sends_more_fields(codec: Any, cls: type[Any], data: st.DataObject):
    value = data.draw(messages(cls))
    message = codec.write(value)
    read = codec.read(type(message).FromString(message.SerializeToString() + field(1023, 1)))
    assert read == value or repr(read) == repr(value)  # a refusal equals none, and is the same if its words are


@every_whole
@unhurried
@given(raw=st.binary(max_size=64))
def test_of_any_bytes_a_message_is_read_or_refused(codec: Any, cls: type[Any], raw: bytes):
    with suppress(DecodeError, InvalidRequest):
        codec.read(codec.schema.FromString(raw))


@every_stream
def test_a_newer_version_s_kind_of_message_is_skipped(stream: Stream[Any]):
    assert stream.read(stream.schema.FromString(field(1023, b""))) is None


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"fault": {"number": 1, "kind": "clock", "seconds": 5e3}}, FaultOrder(1, "clock", seconds=5e3)),
        ({"order": {"quorum_id": 7, "phase": 99}}, session.QuorumOrder(7, session.QuorumPhase.REVOKED)),
    ],
)
def test_an_order_of_a_newer_lighthouse_can_be_read(message: dict[str, Any], read: Any):
    assert streams.SESSION_RESPONSES.read(lighthouse_pb2.SessionResponse(**message)) == read


def test_so_can_a_reason_for_a_heal_of_a_newer_version():
    message = lighthouse_pb2.Distrust(kind="flood", text="wet")
    assert DISTRUST.read(message) == Distrust(DistrustKind.DIVERGENCE, "wet")


def spoiled(cls: type[Any], message: Any) -> Iterator[tuple[str, Any]]:
    """Each field in turn as its type refuses it, and which that is."""
    for one in fields_of(cls):
        for bad in refused(one.each or one):
            wrong = type(message).FromString(message.SerializeToString())
            with suppress(TypeError, ValueError):  # no such value fits into a message
                if one.each is None:
                    setattr(wrong, one.name, bad)
                else:
                    getattr(wrong, one.name).append(bad)
                yield one.name, wrong
        for entries in one.constraints:
            if isinstance(entries, EntryCount):
                for count in {entries.most + 1, entries.least - 1} - {-1}:
                    wrong = type(message).FromString(message.SerializeToString())
                    wrong.ClearField(one.name)
                    getattr(wrong, one.name).extend([getattr(message, one.name)[0]] * count)
                    yield one.name, wrong
        if one.is_message and not one.is_optional:
            wrong = type(message).FromString(message.SerializeToString())
            wrong.ClearField(one.name)
            yield one.name, wrong


@every_part
@few
@given(data=st.data())
def test_what_the_type_of_a_field_refuses_is_refused_by_its_name(cls: type[Any], data: st.DataObject):
    codec = CODECS[cls]
    for name, wrong in spoiled(cls, codec.write(data.draw(messages(cls)))):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            codec.read(wrong)


@every_part
@few
@given(data=st.data())
def test_what_is_too_long_is_cut_by_its_writer_and_by_its_reader(cls: type[Any], data: st.DataObject):
    """Neither trusts the other; what others have written stays one line."""
    codec, value = CODECS[cls], data.draw(messages(cls))
    for one in fields_of(cls):
        for cut in one.constraints:
            if isinstance(cut, Shortened):
                text = LONG if one.each is None or not one.each.constraints else "a"
                long = text if one.each is None else (text,) * 100
                too_long = dataclasses.replace(value, **{one.name: long})
                written = getattr(codec.write(too_long), one.name)
                assert (written if one.each is None else tuple(written)) == cut.shorten(long)
                message = codec.write(value)
                message.ClearField(one.name)
                message.MergeFrom(type(message)(**{one.name: long}))
                assert getattr(codec.read(message), one.name) == cut.shorten(long)


@every_part
def test_every_double_is_checked(cls: type[Any]):
    assert [one.name for one in fields_of(cls) if one.type is float and not one.constraints] == []


@pytest.mark.parametrize(("seconds", "read"), [(3 * MAX_SECONDS, MAX_SECONDS), (-1e-17, 0.0), (math.inf, MAX_SECONDS)])
def test_a_sum_of_durations_that_is_out_of_range_can_be_read(seconds: float, read: float):
    """A job of 1,024 ranks has added up 10^10 seconds after 113 days; one such number must not cost all the others."""
    of_phases = GroupView("a", "i", (), (PhaseSeconds("step", seconds),))
    heartbeat = streams.SESSION_REQUESTS.read(streams.SESSION_REQUESTS.write(session.Heartbeat(3, progress=of_phases)))
    assert heartbeat == session.Heartbeat(3, progress=GroupView("a", "i", (), (PhaseSeconds("step", read),)))


@pytest.mark.parametrize(("seconds", "read"), [(3 * MAX_SECONDS, MAX_SECONDS), (-3 * MAX_SECONDS, -MAX_SECONDS)])
def test_so_can_a_status_with_one(seconds: float, read: float):
    shown = status_of(job(stall_s=seconds, ranks=(place("a", 0, phase_s=seconds, progress_age_s=seconds),)))
    told = LIGHTHOUSE_STATUS.read(LIGHTHOUSE_STATUS.write(shown)).jobs[0]
    assert (told.stall_s, told.ranks[0].phase_s, told.ranks[0].progress_age_s) == (read, read, read)


def test_a_status_can_contain_every_notice():
    """One with a long reason cost the status of all jobs."""
    reason = "r" * MAX_REASON_CHARS
    notice = PreemptionNotice("s" * MAX_TEXT_CHARS, reason, "h" * MAX_REASON_CHARS, 1e9)
    told = streams.SESSION_REQUESTS.read(streams.SESSION_REQUESTS.write(PreemptionReport(notice)))
    assert told == PreemptionReport(notice)
    preemption = status.PreemptionStatus(notice.source, notice.reason, notice.host, 1.0, notice.is_advice)
    shown = status_of(job(member("a", preemption=preemption)))
    assert LIGHTHOUSE_STATUS.read(LIGHTHOUSE_STATUS.write(shown)) == shown


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        (run.RunTerms(world_size=8, min_active=9), "min_active: is 9; at most 8 ranks can be active"),
        (run.RunTerms(world_size=8, divisible_by=3, min_active=7), "min_active: is 7; at most 6 ranks"),
        (hosts.HostHello("a", "r", 2, 2, 8, "i"), "node_rank: is 2; of 2 hosts it is 1 to 1"),
        (GroupView("a", "i", (RankView(RankName("a", 0), ProgressSample(), 1.0),) * 2), "ranks: names a rank twice"),
        (
            GroupView("a", "i", (RankView(RankName("b", 0), ProgressSample(), 1.0),)),
            "ranks: names a rank of another group",
        ),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(value: Any, refusal: str):
    codec = CODECS[type(value)]
    with pytest.raises(InvalidRequest, match=f"^{refusal}"):
        codec.read(codec.write(value))


# -- what a person is to see, and cannot be read, is dropped


@pytest.mark.parametrize(
    ("stream", "value"),
    [
        (streams.WATCH_REQUESTS, ProgressSample(step=-1)),
        (streams.WATCH_REQUESTS, SelfReport(-1)),
        (streams.SESSION_REQUESTS, session.Evidence(3, RankEvidence(-1))),
    ],
)
def test_a_message_for_people_that_cannot_be_read_is_skipped(stream: Stream[Any], value: Any):
    assert stream.read(stream.write(value)) is None


def test_nor_does_progress_end_a_session():
    unreadable = GroupView("a", "i", (RankView(RankName("a", 0), ProgressSample(phases=(OpenPhase("n" * 999),)), 1.0),))
    heartbeat = session.Heartbeat(3, progress=unreadable)
    assert streams.SESSION_REQUESTS.read(streams.SESSION_REQUESTS.write(heartbeat)) == session.Heartbeat(3)
