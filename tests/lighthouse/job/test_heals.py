"""The heals of a job's groups on the lighthouse's loop: their status, and their lines in the log."""

import logging
from dataclasses import replace

import pytest

from lighthouse.job.incident_driver import JobHeals
from lighthouse_protocol.messages.progress import GroupView, HealProgress
from tests.lighthouse_protocol.views import rank
from tests.virtual_loop import VirtualLoop

MIB = 2**20


class Job:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.heals = loop, JobHeals("j", loop)

    def report(self, *ranks: HealProgress | None, name: str = "b", age_s: float = 0.0) -> None:
        """What the manager of that group sends."""
        views = [rank(n, group=name, still_s=0) for n in range(len(ranks))]
        told = [
            replace(view, sample=replace(view.sample, heal=heal), beat_age_s=age_s)
            for view, heal in zip(views, ranks, strict=True)
        ]
        self.heals.take(GroupView(name, "i", tuple(told)))

    def shown(self) -> dict[str, str]:
        return {name: status.text for name, status in self.heals.status().items()}


def heal(received: int, seconds: float, *, is_over: bool = False) -> HealProgress:
    return HealProgress(1, "a", 17, received * MIB, 100 * MIB, seconds, is_over)


@pytest.fixture
def job(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> Job:
    caplog.set_level(logging.INFO)
    return Job(loop)


def test_a_heal_has_a_status_and_lines(job: Job, caplog: pytest.LogCaptureFixture):
    for second in range(1, 26):
        job.loop.go(1)
        job.report(heal(2 * second, second), heal(2 * second, second))
    assert job.shown() == {"b": "healing from a: 100 of 200 MiB, 4.0 MiB/s, 25 s left"}
    job.loop.go(1)
    job.report(*[heal(100, 25.5, is_over=True)] * 2)
    assert job.shown() == {}
    job.loop.go(2)
    assert caplog.messages == [
        "b: healing from a at step 17",
        "b: healing from a: 44 of 200 MiB, 4.0 MiB/s, 39 s left",
        "b: healing from a: 84 of 200 MiB, 4.0 MiB/s, 29 s left",
        "b: healed from a at step 17: 200 MiB in 26 s (7.8 MiB/s)",
    ]
    assert {record.event for record in caplog.records} == {"heal"}  # type: ignore[attr-defined]
    assert caplog.records[0].fields == {"job": "j", "replica_group": "b"}  # type: ignore[attr-defined]


def test_one_that_stands_still_is_told_though_no_view_comes(job: Job, caplog: pytest.LogCaptureFixture):
    job.loop.go(5)
    job.report(heal(50, 5))
    job.loop.go(21)
    assert caplog.messages[1:] == [
        "b: healing from a: 50 of 100 MiB, nothing for 10 s",
        "b: healing from a: 50 of 100 MiB, nothing for 20 s",
    ]


def test_a_view_is_as_old_as_it_says(job: Job):
    job.loop.go(30)
    job.report(heal(50, 5), age_s=8)
    assert job.heals.status()["b"].still_s == 8


def test_a_group_that_is_lost_heals_no_more(job: Job, caplog: pytest.LogCaptureFixture):
    job.report(heal(50, 5))
    job.report(heal(50, 5), name="c")
    job.heals.drop("b")
    job.loop.go(10.5)
    assert set(job.shown()) == {"c"}
    assert [line.split(":")[0] for line in caplog.messages] == ["b", "c", "c"]


def test_nothing_is_kept_of_groups_that_do_not_heal(job: Job, caplog: pytest.LogCaptureFixture):
    job.report(None, None)
    assert not job.heals._heals
    job.report(heal(100, 3, is_over=True), None)
    job.loop.go(2)
    job.report(None, None)
    assert not job.heals._heals
    assert len(caplog.messages) == 1
    job.heals.close()
