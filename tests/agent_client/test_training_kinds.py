"""Each way to train, through a kill and a heal, in both ways to heal: a group that comes back with nothing ends with
its peer's bits of parameters, optimizer, buffers, scaler, scheduler and averages.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_client.healing.rules.catch_up import APPLIED_AT_ONCE
from tests.agent_client.clusters import check_all
from tests.agent_client.ranks import RankError, RankServer
from tests.agent_client.training_jobs import Group, TrainingJob
from tests.agent_client.training_kinds import KINDS
from tests.processes import Lighthouse

TIMES = ("--join-timeout", "5s", "--heartbeat-timeout", "3s")
PACE_S = 0.02
STEPS_AT_THE_END = 3
MODES = ("blocking", "catch_up")
OUTER = ("local_sgd", "diloco", "streamed")
ONLY_BLOCKING = ("hsdp", "hsdp_compile", "hsdp_compile_around", *OUTER)
QUICK = {("scaler", "blocking"), ("local_sgd", "blocking"), ("ema_of_buffers", "catch_up")}

MakeJob = Callable[[str, str], TrainingJob]


@pytest.fixture
def make_job(lighthouse: Lighthouse, store: str, rank_server: RankServer, tmp_path: Path) -> Iterator[MakeJob]:
    with ExitStack() as stack:
        at = lighthouse.address, store, rank_server, tmp_path, stack
        yield lambda kind, mode: TrainingJob(
            *at,
            actor=f"{KINDS[kind].__module__}:{KINDS[kind].__name__}",
            ranks=KINDS[kind].ranks,
            heal_mode=mode,
        )


CELLS = [
    pytest.param(kind, mode, marks=[] if (kind, mode) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for mode in MODES
    if mode == "blocking" or kind not in ONLY_BLOCKING
]


@pytest.mark.parametrize(("kind", "mode"), CELLS)
def test_a_group_that_was_killed_heals_to_the_same_bits(make_job: MakeJob, kind: str, mode: str) -> None:
    job = make_job(kind, mode)
    a, b = job.groups("a", "b")
    job.build(a)
    job.build(b)
    drawn = b.ranks[0].call("digests")
    job.train(a, b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    b.kill()
    job.wait_steps(a, more=3, participants=1)
    step = job.committed(a)[-1]["step"]
    before = len(job.log(b))
    job.build(b)
    assert b.ranks[0].call("digests") != drawn, "another seed"
    if mode == "catch_up" and not KINDS[kind].gives_up:
        b.ranks[0].call("follow_for_long")
    job.train(b, pace_s=PACE_S)
    job.wait_steps(a, b, more=5, participants=2)
    check_healed(kind, mode, job.log(b)[before:])
    if mode == "blocking":
        first = job.committed(b)[0]
        assert first["step"] > step
        assert first["participated"], "in the step in which it heals; an outer step of no inner ones comes before it"
    assert (b.ranks[0].call("graphs") > 0) == hasattr(KINDS[kind], "backend")
    finish(job, a, b)


def check_healed(kind: str, mode: str, log: str) -> None:
    if mode == "blocking" or KINDS[kind].gives_up:
        assert "healing from a" in log
        assert ("catching up is given up" in log) == (mode == "catch_up")
    else:
        assert "caught up at step" in log
        assert "healing from a" not in log
        kept = re.findall(r"catching up: installed step \d+, (\d+) more to apply", log)
        assert int(kept[0]) > APPLIED_AT_ONCE


def finish(job: TrainingJob, *groups: Group) -> None:
    """They stop after the same step, and hold the same bits then, and have held them after each step before."""
    ranks = [rank for group in groups for rank in group.ranks]
    step = groups[0].ranks[0].call("hold")
    for rank in reversed(ranks):  # the first one is held
        rank.call("finish", step + STEPS_AT_THE_END)
    for number in range(len(groups[0].ranks)):
        ends = [group.training[number].result() for group in groups]
        assert [end["step"] for end in ends] == [step + STEPS_AT_THE_END] * len(groups)
        assert ends[0]["hash"] == ends[1]["hash"]
        assert check_all(job.folder, str(number)) > STEPS_AT_THE_END


def test_a_model_is_compiled_around_ddp(make_job: MakeJob) -> None:
    """In graphs that do not reach into the Agent: torch's C++ code calls it in the middle of a compiled region."""
    job = make_job("compile_around", "blocking")
    a = job.group("a")
    job.start(a, pace_s=PACE_S)
    job.wait_steps(a, more=2, participants=1)
    assert a.ranks[0].call("graphs") > 0


@pytest.mark.parametrize("kind", ONLY_BLOCKING)
def test_what_cannot_catch_up_is_refused(make_job: MakeJob, kind: str) -> None:
    job = make_job(kind, "catch_up")
    with pytest.raises(RankError, match=r"ConfigurationError: heal_mode catch_up: not .*; use heal_mode='blocking'"):
        job.build(job.group("a"))
