"""Where ranks are, on the wire: there and back, and every check of a field."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.progress import (
    MAX_DEPTH,
    MAX_NAMES,
    Collective,
    GroupView,
    OpenPhase,
    PhaseTime,
    RankName,
    RankView,
    Sample,
)
from lighthouse_protocol.pb.extensions.progress_pb2 import GroupProgress, ProgressSample
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.progress_wire import (
    MAX_SUMS,
    MAX_TIMES,
    group_view_from_wire,
    group_view_to_wire,
    sample_from_wire,
    sample_to_wire,
)

names = st.text("abc (é)/", max_size=64)
counts = st.integers(0, 2**40)
ages = st.floats(0, 1e9)
samples = st.builds(
    Sample,
    step=counts,
    phases=st.lists(st.builds(OpenPhase, names, counts, st.none() | counts, ages), min_size=1, max_size=3).map(tuple),
    entered=st.lists(st.tuples(names, counts), max_size=3).map(tuple),
    collective=st.none() | st.builds(Collective, counts, counts, names, names, st.booleans(), st.booleans(), counts),
    waits_for=names,
    still_s=ages,
    is_first=st.booleans(),
    times=st.lists(st.builds(PhaseTime, names, counts, ages, ages), max_size=3).map(tuple),
)


@settings(max_examples=30)
@given(samples)
@example(Sample(phases=(OpenPhase("validation", 0, 0),)))
def test_a_sample_there_and_back(sample: Sample):
    assert sample_from_wire(ProgressSample.FromString(sample_to_wire(sample).SerializeToString())) == sample


@settings(max_examples=20)
@given(st.lists(samples, max_size=2), st.text("abc", max_size=9), ages, counts)
def test_a_group_there_and_back(found: list[Sample], text: str, age_s: float, pid: int):
    ranks = tuple(RankView(RankName("g", n), s, age_s, age_s, text, text, pid) for n, s in enumerate(found))
    view = GroupView("g", text, ranks, (("step", age_s), (text, 0.0)))
    assert group_view_from_wire(GroupProgress.FromString(group_view_to_wire(view).SerializeToString())) == view


STEP = [{"name": "step"}]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("step", ProgressSample(step=-1, phases=STEP)),
        ("phases", ProgressSample()),
        ("phases", ProgressSample(phases=STEP * (MAX_DEPTH + 1))),
        ("name", ProgressSample(phases=[{"name": "n" * 65}])),
        ("done", ProgressSample(phases=[{"name": "n", "done": -1}])),
        ("total", ProgressSample(phases=[{"name": "n", "total": -1}])),
        ("open_s", ProgressSample(phases=[{"name": "n", "open_s": -1}])),
        ("entered", ProgressSample(phases=STEP, entered=[{"name": "n"}] * (MAX_NAMES + 1))),
        ("entered", ProgressSample(phases=STEP, entered=[{"name": "n", "entered": -1}])),
        ("name", ProgressSample(phases=STEP, entered=[{"name": "n" * 65}])),
        ("quorum_id", ProgressSample(phases=STEP, collective={"quorum_id": -1})),
        ("number", ProgressSample(phases=STEP, collective={"number": -1})),
        ("operation", ProgressSample(phases=STEP, collective={"operation": "o" * 65})),
        ("shape", ProgressSample(phases=STEP, collective={"shape": "o" * 129})),
        ("waits_for", ProgressSample(phases=STEP, waits_for="w" * 65)),
        ("still_s", ProgressSample(phases=STEP, still_s=math.nan)),
        ("still_s", ProgressSample(phases=STEP, still_s=math.inf)),
        ("times", ProgressSample(phases=STEP, times=[{"name": "n"}] * (MAX_TIMES + 1))),
        ("visits", ProgressSample(phases=STEP, times=[{"visits": -1}])),
        ("seconds", ProgressSample(phases=STEP, times=[{"seconds": -1}])),
        ("longest_s", ProgressSample(phases=STEP, times=[{"longest_s": -1}])),
    ],
)
def test_a_bad_sample_is_refused_by_the_name_of_its_field(field: str, message: ProgressSample):
    with pytest.raises(InvalidRequest) as refused:
        sample_from_wire(message)
    assert str(refused.value).startswith(f"{field}: ")


HERE = {"phases": STEP}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("replica_id", GroupProgress()),
        ("incarnation", GroupProgress(replica_id="g", incarnation="i" * 513)),
        ("group_rank", GroupProgress(replica_id="g", ranks=[{"group_rank": -1, "sample": HERE}])),
        ("group_rank", GroupProgress(replica_id="g", ranks=[{"group_rank": MAX_GROUP_WORLD_SIZE, "sample": HERE}])),
        ("ranks", GroupProgress(replica_id="g", ranks=[{"sample": HERE}] * 2)),
        ("phases", GroupProgress(replica_id="g", ranks=[{}])),
        ("limit_s", GroupProgress(replica_id="g", ranks=[{"sample": HERE, "limit_s": -1}])),
        ("beat_age_s", GroupProgress(replica_id="g", ranks=[{"sample": HERE, "beat_age_s": math.nan}])),
        ("worker", GroupProgress(replica_id="g", ranks=[{"sample": HERE, "worker": "w" * 513}])),
        ("host", GroupProgress(replica_id="g", ranks=[{"sample": HERE, "host": "w" * 513}])),
        ("pid", GroupProgress(replica_id="g", ranks=[{"sample": HERE, "pid": -1}])),
        ("seconds", GroupProgress(replica_id="g", seconds=[{"name": "n"}] * (MAX_SUMS + 1))),
        ("seconds", GroupProgress(replica_id="g", seconds=[{"seconds": -1}])),
    ],
)
def test_a_bad_group_is_refused_by_the_name_of_its_field(field: str, message: GroupProgress):
    with pytest.raises(InvalidRequest) as refused:
        group_view_from_wire(message)
    assert str(refused.value).startswith(f"{field}: ")
