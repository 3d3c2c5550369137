"""A script that leaves out a step, a batch or a collective costs its own group that step, and its peers nothing that is
silent: weights are equal wherever two groups have committed the same step."""

import inspect
import re
from typing import Any

import pytest
import torch

from lighthouse_runtime.client.clients import LighthouseClient
from tests.agent_client.jobs import Job
from tests.agent_client.left_out_actor import SAMPLES
from tests.agent_client.ranks import Rank, together
from tests.processes import Lighthouse, eventually

TIMES = ("--join-timeout", "10s", "--heartbeat-timeout", "5s")
ACTOR = "tests.agent_client.left_out_actor:LeftOutActor"
AT, UNTIL = 4, 8
Voted = list[dict[str, Any]]


def train(job: Job, kind: str, **options: Any) -> tuple[Voted, Voted, Rank, Rank]:
    """`kind` is what b does in one step; a trains plainly."""
    a, b = begin(job)
    of_b = b.begin("train", UNTIL, kind, (AT,), **options)
    of_a = a.begin("train", UNTIL)
    return of_a.result(), of_b.result(), a, b


def begin(job: Job, **options: Any) -> tuple[Rank, Rank]:
    """Two groups in one quorum, which has stood for some steps."""
    a, b = job.groups("a", "b", actor=ACTOR, **options)
    begun = a.begin("train", AT - 1)
    job.wait_joined("a")
    of_b = b.begin("train", AT - 1)
    check_equal(begun.result(), of_b.result())
    return a, b


def has_norm(kind: str) -> bool:
    """Whether the model of a loop has a BatchNorm.

    DistributedDataParallel of older versions of torch refuses two forward passes through one before a backward pass:
    it writes to the buffers before each. Newer ones hide that write from autograd.
    """
    writes = inspect.getsource(torch.nn.parallel.DistributedDataParallel._sync_buffers)
    return kind != "two_views" or "_unsafe_preserve_version_counter" in writes


def check_equal(*histories: Voted) -> None:
    committed = [{each["step"]: each["weights"] for each in voted if each.get("committed")} for voted in histories]
    shared = set.intersection(*map(set, committed))
    assert shared, committed
    assert all(len({each[step] for each in committed}) == 1 for step in shared)


def discards(voted: Voted) -> list[int]:
    return [each["step"] for each in voted if not each.get("committed")]


@pytest.mark.parametrize("kind", ["after_backward", pytest.param("after_backward_zeroed", marks=pytest.mark.slow)])
def test_a_step_without_a_vote_after_a_backward_pass_is_discarded_at_once(job: Job, kind: str) -> None:
    of_a, of_b, _, b = train(job, kind)
    check_equal(of_a, of_b)
    assert discards(of_b) == [], "its script never votes on the step"
    assert set(discards(of_a)) <= {AT + 1, AT + 2}, (
        "the peers have committed it; b heals in the next one, and does it again"
    )
    assert of_a[-1]["weights"] == of_b[-1]["weights"]
    assert f"step {AT} discarded: the script has not voted on it" in job.log("b")
    assert "; samples here: " in job.log("b")
    assert "agent.skip_batch(reason)" in job.log("b")
    assert "healing from a" in job.log("b")
    assert b.call("get", "passes") <= UNTIL + 2


def test_a_batch_that_is_left_out_before_its_backward_pass_costs_the_peers_only_its_weight(job: Job) -> None:
    of_a, of_b, _, b = train(job, "before_backward")
    check_equal(of_a, of_b)
    assert set(discards(of_a)) <= {AT + 1}
    batches = {each["step"]: each["batches"] for each in of_a if each["committed"]}
    assert [batches[step] - batches[step - 1] for step in (AT, AT + 1)] == [2, 2], "none is drawn again"
    assert f"step {AT} discarded: the script has left it out" in job.log("b")
    assert b.call("get", "passes") <= UNTIL + 2


@pytest.mark.parametrize("kind", ["passed_over", "wrapped_again"])
def test_a_batch_that_is_passed_over_costs_nobody_a_step(job: Job, kind: str) -> None:
    of_a, of_b, _, _ = train(job, kind)
    check_equal(of_a, of_b)
    assert discards(of_a) == discards(of_b) == []
    assert [each["weights"] for each in of_a] == [each["weights"] for each in of_b]
    assert [each["buffers"] for each in of_a] == [each["buffers"] for each in of_b]
    batches = [each["batches"] for each in of_a]
    assert batches == [each["batches"] for each in of_b]
    assert [after - before for before, after in zip(batches, batches[1:], strict=False)] == [2, 2, 2, 2]
    assert f"step {AT}: a test has no use for it; batch skipped; samples here: " in job.log("b")


def test_a_microbatch_that_is_passed_over_adds_nothing(job: Job) -> None:
    of_a, of_b, _, _ = train(job, "microbatch_passed_over")
    check_equal(of_a, of_b)
    assert discards(of_a) == discards(of_b) == []
    reference_a, reference_b, _, _ = train(job.elsewhere(), "microbatch_left_out")
    check_equal(of_a, of_b, reference_a, reference_b)
    assert f"step {AT}: a test has no use for it; batch skipped; samples here: " in job.log("b")


def test_a_batch_that_is_skipped_is_not_measured(job: Job) -> None:
    a, b = begin(job)
    of_b = b.begin("train", UNTIL, "passed_over")
    a.call("train", UNTIL)
    of_b.result()
    assert a.call("measured") > 0
    assert b.call("measured") == 0


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 64, 10_000])
def test_one_sum_more_ends_the_group_that_differs(job: Job, size: int) -> None:
    """Whatever its size: gloo would sum it silently, or end the healthy process by SIGABRT. 64 is that of a bucket."""
    a, b = begin(job, norm=False)
    of_b = b.begin("train", UNTIL, "metric", (AT,), size=size)
    of_a = a.begin("train", UNTIL)
    ended = of_b.result()[-1]["error"]
    assert ended.startswith(f"ScriptMismatch: step {AT}: this group (b) reduces {4 * size} bytes of float32 (metric)")
    assert f"of step {AT} where a reduces" in ended
    b.kill()
    voted = of_a.result()
    assert voted[-1]["committed"]
    assert discards(voted) == [AT + 1], "the one that it has begun with b"


def test_of_two_groups_the_one_that_joined_later_is_at_fault(job: Job) -> None:
    """Though it comes first in the alphabet, and has trained since."""
    [z] = job.groups("z", actor=ACTOR)
    z.call("train", 2)
    [c] = job.groups("c", actor=ACTOR)
    of_c = c.begin("train", UNTIL, "metric", (AT,), size=3)
    job.wait_joined("c")
    of_z = z.begin("train", UNTIL)
    assert "ScriptMismatch" in of_c.result()[-1]["error"]
    c.kill()
    assert of_z.result()[-1]["committed"]


class TestNotFinite:
    def test_the_step_is_discarded_in_all_groups_and_the_group_is_named(self, job: Job, lighthouse: Lighthouse) -> None:
        of_a, of_b, _, _ = train(job, "infinite")
        check_equal(of_a, of_b)
        assert discards(of_a) == discards(of_b) == [AT]
        for name in "ab":
            assert f"step {AT} discarded: the gradient of b is not finite (" in job.log(name)
        [told] = re.findall(r"discarded: (the gradient of b .*; samples here: .*)", job.log("b"))
        with LighthouseClient(lighthouse.address, job=job.name) as client:
            [incident] = eventually(lambda: client.incidents(job.name), "an incident")
            assert (incident.kind, incident.suspects) == ("nonfinite", ("b/0",))
            assert incident.text == f"b/0: step {AT} discarded: {told}"
            [status] = client.status(job.name).jobs
        assert status.data is not None
        assert (status.data.length, status.data.is_exact) == (SAMPLES, True)
        assert 4 * AT < status.data.samples <= 4 * of_a[-1]["batches"]

    def test_as_often_as_the_limit_says_the_run_ends_with_that_reason(self, job: Job) -> None:
        a, b = begin(job, max_consecutive_discards=3)
        of_b = b.begin("train", UNTIL, "infinite", (AT,), always=True)
        of_a = a.begin("train", UNTIL)
        for ended in (of_a.result()[-1]["error"], of_b.result()[-1]["error"]):
            assert "3 steps discarded in a row (max_consecutive_discards): the gradient of b is not finite" in ended

    def test_it_may_end_the_rank_at_once_or_be_committed(self, job: Job) -> None:
        [a] = job.groups("a", actor=ACTOR, on_nonfinite="raise")
        ended = a.call("train", UNTIL, "infinite", (1,))[-1]
        assert ended["step"] == 1
        assert "the gradient of a is not finite" in ended["error"]
        assert "on_nonfinite is 'raise'" in ended["error"]
        a.kill()
        [b] = job.groups("b", actor=ACTOR, on_nonfinite="commit")
        assert discards(b.call("train", 3, "infinite", (1,))) == []

    def test_it_is_left_to_a_grad_scaler_which_must_see_it(self, job: Job) -> None:
        a, b = job.groups("a", "b", actor=ACTOR, scaler=True)
        of_a, of_b = together((a, b), "train", UNTIL, "scaled", (AT,))
        check_equal(of_a, of_b)
        assert discards(of_a[-UNTIL + AT :]) == discards(of_b[-UNTIL + AT :]) == []
        assert "is not finite" not in job.log("a")
        assert a.call("scale") == b.call("scale") == 2.0**15, "half of what it begins with"


MORE = ["accumulated", "sam", "sums_of_tasks", "two_views", "evaluated", "looked_at", "two_samplers"]


@pytest.mark.parametrize("kind", MORE)
def test_a_loop_that_does_more_in_a_step_loses_none(job: Job, kind: str) -> None:
    """In all of its steps."""
    [a] = job.groups("a", actor=ACTOR, norm=has_norm(kind))
    assert discards(a.call("train", 5, kind)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_a_loop_that_does_more_in_some_steps_loses_at_most_a_few_attempts(job: Job, kind: str) -> None:
    """Both groups do the same; what a script has once done in a committed step is never held against it."""
    a, b = begin(job)
    of_a, of_b = together((a, b), "train", 12, kind, (5, 7, 9))
    check_equal(of_a, of_b)
    assert all("error" not in each for each in of_a + of_b)
    assert of_a[-1]["weights"] == of_b[-1]["weights"]
    assert "ScriptMismatch" not in job.log("a") + job.log("b")
    assert job.log("a").count("discarded: the script has") <= 4
    later = [each for each in of_a if each["step"] > 5]
    assert discards(later) == []
