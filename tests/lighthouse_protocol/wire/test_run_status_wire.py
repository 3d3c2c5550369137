"""A run's status and its keys survive the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse_protocol.messages.run import Counters, KeyKind, Stop, Terms
from lighthouse_protocol.messages.run_status import (
    ExcludedHost,
    RankStatus,
    RunStatus,
    SupervisorStatus,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.run_status_wire import (
    check_kind,
    keys_from_wire,
    keys_to_wire,
    run_from_wire,
    runs_from_wire,
    runs_to_wire,
)
from tests.lighthouse_protocol.wire.test_generation_wire import numbers, terms, texts, timeouts, unhurried

last = st.integers(-1, 2**53)
slots = st.integers(0, 1000)
ranks = st.builds(
    RankStatus,
    slot=slots,
    incarnation=texts,
    state=texts,
    rank=st.none() | slots,
    generation=st.none() | numbers,
    step=numbers,
    phase=texts,
    beat_age_s=timeouts,
    attempt=slots,
    host=texts,
    pid=numbers,
)
runs = st.builds(
    RunStatus,
    job=texts,
    run=texts,
    verdict=texts,
    counters=st.builds(Counters, last, numbers, numbers, numbers),
    terms=terms,
    slots=st.lists(slots, max_size=4).map(tuple),
    is_complete=st.booleans(),
    stop=st.none() | st.builds(Stop, texts, texts, last),
    ranks=st.lists(ranks, max_size=2).map(tuple),
    supervisors=st.lists(
        st.builds(SupervisorStatus, texts, texts, st.lists(slots, max_size=3).map(tuple), st.booleans()), max_size=2
    ).map(tuple),
    excluded=st.lists(st.builds(ExcludedHost, texts, texts, timeouts), max_size=2).map(tuple),
)
keys = st.dictionaries(st.tuples(st.sampled_from(KeyKind), texts), st.binary(max_size=20), max_size=4)


@unhurried
@given(st.lists(runs, max_size=2).map(tuple))
def test_runs_survive(said: tuple[RunStatus, ...]):
    raw = runs_to_wire(said).SerializeToString()
    assert runs_from_wire(pb.RunsResponse.FromString(raw)) == said


@given(last, keys)
def test_keys_survive(generation: int, said: dict[tuple[KeyKind, str], bytes]):
    raw = keys_to_wire(generation, said).SerializeToString()
    assert keys_from_wire(pb.GetKeysResponse.FromString(raw)) == (generation, said)


def test_a_kind_of_a_newer_lighthouse_is_skipped():
    message = pb.GetKeysResponse(generation=3, keys=[pb.Key(kind="unheard", name="a", value=b"1")])
    assert keys_from_wire(message) == (3, {})


def test_a_kind_is_one_of_the_documents():
    assert check_kind("job_restart") is KeyKind.JOB_RESTART
    with pytest.raises(InvalidRequest, match=r"^kind: is 'odd'; iteration, job_restart, ranks_restart are known$"):
        check_kind("odd")


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (pb.RunStatus(number=-2, terms=pb.RunTerms(world_size=1)), "number"),
        (pb.RunStatus(job_restarts=-1), "job_restarts"),
        (pb.RunStatus(), "world_size"),
    ],
)
def test_a_malformed_status_is_refused(said: pb.RunStatus, field: str):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        run_from_wire(said)


def test_terms_of_a_run_of_no_rank_can_be_said():
    """A run of supervisors alone."""
    run = RunStatus("j", "r", "nobody_ready", Counters(), Terms(), (), False, None, (), (), ())
    assert runs_from_wire(runs_to_wire([run])) == (run,)
