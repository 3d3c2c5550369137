"""Two groups of two ranks, one of which stands still: what `lighthouse ranks` and the logs say of that."""

import re
from typing import Any

import pytest

from tests.agent_client.jobs import Job, ask
from tests.agent_client.ranks import Rank
from tests.processes import Lighthouse, eventually, http_get

STALL_AFTER_S = 8.0
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "7s", "--min-replicas", "2", "--stall-timeout", "8s")
TIMES_S = {"timeout_s": 600.0, "quorum_timeout_s": 600.0}
ACTOR = "tests.agent_client.marking_actor:MarkingActor"
MOVES_FOR_STEPS = 20


@pytest.fixture
def ranks(job: Job) -> list[Rank]:
    """a/0, a/1, b/0, b/1."""
    job.start_managers("a", "b", ranks=2, stall_timeout_s=STALL_AFTER_S)
    return list(job.groups_of(2, "a", "b", actor=ACTOR, **TIMES_S).values())


def look(lighthouse: Lighthouse) -> dict[str, Any]:
    """The job, or one without ranks while none has reported yet."""
    jobs = [job for job in ask(lighthouse.address, "ranks")["jobs"] if job["ranks"]]
    return jobs[0] if jobs else {"ranks": [], "stall": ""}


def moving(lighthouse: Lighthouse, after: int) -> dict[str, Any]:
    """Once all ranks are so many steps further and nobody is said to be behind."""

    def seen() -> dict[str, Any] | None:
        job = look(lighthouse)
        is_on = len(job["ranks"]) == 4 and all(rank["step"] >= after for rank in job["ranks"])
        return job if is_on and not job["stall"] else None

    return eventually(seen, f"all at step {after}", within_s=180.0)


def stalled(lighthouse: Lighthouse, words: str) -> dict[str, Any]:
    def seen() -> dict[str, Any] | None:
        job = look(lighthouse)
        return job if words in job["stall"] else None

    return eventually(seen, words, within_s=180.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_stands_still_is_named_alone(job: Job, lighthouse: Lighthouse, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.begin("train")
    steps = max(rank["step"] for rank in moving(lighthouse, MOVES_FOR_STEPS)["ranks"])
    assert "nothing has moved" not in lighthouse.log()

    ranks[3].call("hold")
    seen = stalled(lighthouse, "b/1 behind in validation 1/3, a/0-1, b/0 waiting in all_reduce")
    first, *others = seen["ranks"]
    assert (first["replica_id"], first["group_rank"], first["state"]) == ("b", 1, "behind")
    assert (first["phase"], first["done"], first["total"], first["pid"]) == ("validation", 1, 3, ranks[3].pid)
    assert first["progress_age_s"] > STALL_AFTER_S
    assert first["beat_age_s"] < first["progress_age_s"]
    assert {(rank["state"], rank["collective"], rank["is_inside"]) for rank in others} == {
        ("waiting", "all_reduce", True)
    }
    lighthouse.wait_for_log("nothing has moved for")

    lighthouse.wait_for_log(r"incident \S+: notified: nothing is killed")
    [evidence] = ask(lighthouse.address, "stacks", "--rank", "b/1", "--job", seen["job"])["evidence"]
    assert (evidence["replica_id"], evidence["group_rank"], evidence["pid"]) == ("b", 1, ranks[3].pid)
    assert 'marking_actor.py", line' in evidence["stacks"]

    ranks[3].call("release")
    moving(lighthouse, steps + MOVES_FOR_STEPS)
    lighthouse.wait_for_log("progress resumed")
    eventually(lambda: ask(lighthouse.address, "incidents")[0]["step_s"], "the incident knows that a step is committed")

    in_validation = re.compile(r'lighthouse_rank_phase_seconds_total\{.*phase="validation"\} [1-9]')
    eventually(lambda: in_validation.search(http_get(lighthouse.http + "/metrics")[1]), "the validation's time counts")

    ranks[3].stop()
    eventually(lambda: "b/1" not in names(look(lighthouse)), "a rank that is stopped is lost, and not behind")


def names(job: dict[str, Any]) -> set[str]:
    return {f"{rank['replica_id']}/{rank['group_rank']}" for rank in job["ranks"]}
