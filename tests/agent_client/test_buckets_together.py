"""The buckets of a backward pass are announced together: one comparison a step, and none of what it finds is lost."""

import math

import pytest

from tests.agent_client.jobs import Job
from tests.agent_client.ranks import Rank, together
from tests.agent_client.scripted_actor import ScriptedActor

ACTOR = f"{ScriptedActor.__module__}:{ScriptedActor.__name__}"
BUCKETS = ((145, 1.0), (3, 1.0), (29, 1.0))


@pytest.fixture
def pair(job: Job) -> tuple[Rank, Rank]:
    """Both have done a step together."""
    a, b = job.groups("a", "b", actor=ACTOR)
    of_b = b.begin("step_of_buckets", *BUCKETS)
    job.wait_joined("b")
    assert a.call("step_of_buckets", *BUCKETS)["participants"] == ["a", "b"]
    assert of_b.result()["committed"]
    return a, b


def test_one_comparison_serves_all_of_them(pair: tuple[Rank, Rank]) -> None:
    for step in together(pair, "step_of_buckets", *BUCKETS):
        assert step["committed"]
        assert step["compared"] == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_another_size_is_found_before_the_first_byte(job: Job, pair: tuple[Rank, Rank], place: int) -> None:
    """gloo would end the process of the group that is right."""
    a, b = pair
    wrong = [(size - (at == place), value) for at, (size, value) in enumerate(BUCKETS)]
    of_a = a.begin("step_of_buckets", *BUCKETS)
    told = b.call("step_of_buckets", *wrong)["mismatch"]
    sizes = [size for size, _ in wrong]
    says = f"reduces {4 * sizes[0]} bytes of float32 (bucket 0, then {sizes[1]} of float32, then {sizes[2]} of float32)"
    assert f"this group (b) {says}" in told
    assert not of_a.result()["committed"]
    assert a.call("step_of_buckets", *BUCKETS)["committed"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_not_finite_is_discarded_everywhere_and_named(
    job: Job, pair: tuple[Rank, Rank], place: int
) -> None:
    a, b = pair
    wrong = [(size, math.nan if at == place else value) for at, (size, value) in enumerate(BUCKETS)]
    of_b = b.begin("step_of_buckets", *wrong)
    assert not a.call("step_of_buckets", *BUCKETS)["committed"]
    assert not of_b.result()["committed"]
    for name in "ab":
        assert f"the gradient of b is not finite (bucket {place})" in job.log(name)
    assert all(step["committed"] for step in together(pair, "step_of_buckets", *BUCKETS))


def test_a_sum_that_overflows_is_discarded_everywhere(job: Job, pair: tuple[Rank, Rank]) -> None:
    assert not any(step["committed"] for step in together(pair, "step_of_buckets", (145, 1.0), (3, 3e38)))
    for name in "ab":
        assert "the mean is not finite (bucket 1)" in job.log(name)


def test_what_a_script_reduces_in_between_costs_one_step_and_no_later_one(job: Job, pair: tuple[Rank, Rank]) -> None:
    """From then on each bucket is announced by itself, also under the quorums of newcomers."""
    first, *rest = zip(*together(pair, "steps_of_buckets", 3, *BUCKETS, between=True), strict=True)
    assert not any(step["committed"] for step in first)
    assert all(step["committed"] for steps in rest for step in steps)
    assert rest[-1][0]["compared"] == 4
    [c] = job.groups("c", actor=ACTOR)
    of_c = c.begin("step_of_buckets", *BUCKETS, between=True)
    job.wait_joined("c")
    for step in (*together(pair, "step_of_buckets", *BUCKETS, between=True), of_c.result()):
        assert step["participants"] == ["a", "b", "c"]
        assert step["committed"]
    assert "ScriptMismatch" not in job.log("a") + job.log("c")


def test_what_only_one_reduces_in_between_ends_it_with_the_cause(job: Job, pair: tuple[Rank, Rank]) -> None:
    a, b = pair
    of_b = b.begin("step_of_buckets", *BUCKETS, between=True)
    assert not a.call("step_of_buckets", *BUCKETS)["committed"]
    assert not of_b.result()["committed"]
    assert "reduces something else between the buckets" in job.log("b")
    of_b = b.begin("step_of_buckets", *BUCKETS, between=True)
    a.call("step_of_buckets", *BUCKETS)
    assert "this group (b) reduces 20 bytes of float32 (metric) as collective 2" in of_b.result()["mismatch"]
    assert a.call("step_of_buckets", *BUCKETS)["committed"]
