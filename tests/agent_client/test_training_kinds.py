"""What goes into a step beside the averaged gradients, through a kill and a heal, in both ways to heal: a group that
comes back with nothing ends with its peer's bits of parameters, optimizer, buffers, scaler, scheduler and averages.
And loops of the script's own (own_loops.py), which also lose a step.
"""

import re

import pytest

from agent_client.healing.rules.catch_up import APPLIED_AT_ONCE
from tests.agent_client.matrix_events import PACE_S, Cell, finish
from tests.agent_client.own_loops import OWN_LOOPS
from tests.agent_client.ranks import RankError
from tests.agent_client.training_jobs import MakeJob
from tests.agent_client.training_kinds import KINDS, WAYS, Ddp

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
QUICK = {("scaler", "blocking"), ("scaler", "catch_up"), ("ema_of_buffers", "catch_up")}
FOLLOWED_STEPS = 4
"""Before a transfer that is held begins."""
GIVEN_UP = (
    "catching up failed, healing by copying the state instead: step \\d+: its gradients differ from those of the other"
)
CELLS = [
    pytest.param(kind, mode, marks=[] if (kind, mode) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for mode in ("blocking", "catch_up")
    # test_matrix.py has those of WAYS, which heal plainly
    if kind not in WAYS or mode == "catch_up"
    if (kind, mode) != ("moco", "catch_up")  # refused, see below
]


@pytest.mark.parametrize(("kind", "mode"), [*CELLS, *((loop, "blocking") for loop in OWN_LOOPS)])
def test_a_group_that_was_killed_heals_to_the_same_bits(make_job: MakeJob, kind: str, mode: str) -> None:
    actor = (KINDS | OWN_LOOPS)[kind]
    job = make_job(actor, heal_mode=mode)
    a, b = job.all_groups("a", "b")
    job.build(a)
    job.build(b)
    drawn = b.ranks[0].call("digests")
    job.train(a, b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    if kind in OWN_LOOPS:
        a.ranks[0].call("fail_once")
        job.wait_steps(a, b, more=3, participants=2)
        assert job.discarded(a)
    b.kill()
    job.wait_steps(a, more=3, participants=1)
    step = job.committed(a)[-1]["step"]
    before = len(job.log_of(b))
    job.build(b)
    assert b.ranks[0].call("digests") != drawn, "another seed"
    if mode == "catch_up" and not actor.gives_up:
        for rank in b.ranks:
            rank.call("follow_for", FOLLOWED_STEPS)
    job.train(b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    check_healed(actor, mode, job.log_of(b)[before:])
    if mode == "blocking":
        first = job.committed(b)[0]
        assert first["step"] > step
        assert first["participated"], "in the step in which it heals"
    assert (b.ranks[0].call("graphs") > 0) == hasattr(actor, "backend")
    finish(Cell(kind, job), [a, b])


def check_healed(actor: type[Ddp], mode: str, log: str) -> None:
    if mode == "blocking" or actor.gives_up:
        assert "healing from a" in log
        assert len(re.findall(GIVEN_UP, log)) == (mode == "catch_up")
    else:
        assert "caught up at step" in log
        assert "healing from a" not in log
        kept = re.findall(r"catching up: installed step \d+, (\d+) more to apply", log)
        assert int(kept[0]) > APPLIED_AT_ONCE


def test_a_model_is_compiled_around_ddp(make_job: MakeJob) -> None:
    """In graphs that do not reach into the Agent: torch's C++ code calls it in the middle of a compiled region."""
    job = make_job(KINDS["compile_around"])
    a = job.group("a")
    job.start(a, pace_s=PACE_S)
    job.wait_steps(a, more=2, participants=1)
    assert a.ranks[0].call("graphs") > 0


@pytest.mark.parametrize("way", ["local_sgd", "diloco"])
def test_what_cannot_catch_up_is_refused(make_job: MakeJob, way: str) -> None:
    job = make_job(WAYS[way], heal_mode="catch_up")
    with pytest.raises(RankError, match=r"ConfigurationError: heal_mode catch_up: not .*; use heal_mode='blocking'"):
        job.build(job.group("a"))


def test_a_model_that_moves_in_its_forward_pass_cannot_catch_up(make_job: MakeJob) -> None:
    """What a group applies while it catches up is the optimizer's alone."""
    job = make_job(KINDS["moco"], heal_mode="catch_up")
    a = job.group("a")
    job.start(a)
    with pytest.raises(RankError, match=r"heal_mode catch_up: not with .*, which changes in the forward pass; use"):
        a.training[0].result()
