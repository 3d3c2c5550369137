"""Sums of the ledger's lines."""

import json

import pytest

from lighthouse.job.costs import RESTART_S, add_up
from lighthouse.job.ledger import Cause

T = 1_700_000_000.0


def line(group: str = "a", at: float = 0.0, to: float = 300.0, job: str = "j", hosts=("n1",), **seconds: float) -> str:
    document = {"job": job, "group": group, "from": T + at, "to": T + to, "hosts": hosts, "ranks": 8}
    return json.dumps({**document, "seconds": seconds or {"compute": to - at}})


def fault(id: str = "i1", at: float = 100.0, group: str = "a", job: str = "j", **fields: object) -> str:
    given = {"id": id, "job": job, "kind": "loss", "text": "x", "suspects": [group], "noticed_s": 2.0}
    return json.dumps({"job": job, "fault": {**given, "opened_unix_s": T + at + 2.0, **fields}})


def test_nothing_adds_up_to_nothing():
    report = add_up([])
    assert (report.group_s, report.goodput, report.mttf_s, report.faults, report.by_host) == (0, None, None, [], {})
    assert sum(report.seconds.values()) == 0
    assert add_up([], since=T, until=T + 100).recorded_s == 0


def test_hours_by_cause_group_and_host():
    lines = [line("a", compute=200, wait=60, down=40), line("b", hosts=("n1", "n2"), compute=280, heal=20)]
    report = add_up(lines)
    assert (report.group_s, report.recorded_s, report.groups, report.goodput) == (600, 300, 2, 0.8)
    spent = {"compute": 480, "wait": 60, "heal": 20, "down": 40}
    assert report.seconds == dict.fromkeys(Cause, 0) | spent
    assert report.lost_s == 120
    assert report.by_group["b"][Cause.HEAL] == 20
    assert {host: sum(spent.values()) for host, spent in report.by_host.items()} == {"n1": 450, "n2": 150}
    assert sum(sum(column.values()) for column in report.columns) == pytest.approx(600)
    assert sum(report.columns[0].values()) == pytest.approx(10)


def test_time_on_an_unknown_host_counts():
    assert sum(add_up([line(hosts=())]).by_host["(unknown)"].values()) == 300


def test_a_period_cuts_intervals_in_proportion():
    lines = [line(at=0, to=300, compute=240, wait=60), line(at=300, to=600)]
    report = add_up(lines, since=T + 150, until=T + 450)
    assert (report.group_s, report.seconds[Cause.WAIT], report.recorded_s) == (300, 30, 300)
    outside = add_up([*lines, fault()], since=T + 5000, until=T + 6000)
    assert (outside.group_s, outside.faults, outside.recorded_s, outside.until_unix_s) == (0, [], 0, T + 6000)


def test_a_period_without_records_does_not_end_before_it_begins():
    after, before = add_up([line(), fault()], since=T + 5000), add_up([line(), fault()], until=T - 5000)
    assert (after.since_unix_s, after.until_unix_s, after.group_s, after.faults) == (T + 5000, T + 5000, 0, [])
    assert (before.since_unix_s, before.until_unix_s, before.group_s, before.faults) == (T - 5000, T - 5000, 0, [])


def test_a_lighthouse_that_was_away_leaves_a_gap():
    report = add_up([line(to=100), line("b", to=100), line(at=160, to=300), line("b", 160, 300)])
    assert (report.recorded_s, report.group_s, report.groups) == (240, 480, 2)
    nested = [line(), line("b", 10, 100), line("c", 150, 200)]
    assert add_up(nested).recorded_s == 300


def test_times_of_faults():
    known = [
        fault("i1", 10, step_s=None),
        fault("i1", 10, step_s=5.0, back_s=60.0),
        fault("i2", 200, "b/3", noticed_s=4, kind="stall"),
    ]
    report = add_up([line("a"), line("b", hosts=("n2",)), *known])
    assert len(report.faults) == 2
    assert (report.mttf_s, report.recover_s, report.back_s, report.notice_s) == (150, 5, 60, 3)
    assert report.faults_by_host == {"n1": 1, "n2": 1}
    assert report.faults_by_group == {"a": 1, "b": 1}


def test_the_model_of_checkpoints_is_half_an_interval_and_one_restart_per_fault_and_group():
    lines = [line("a"), line("b"), fault("i1", 10, back_s=60.0), fault("i2", 200)]
    assert add_up(lines).checkpoints_lost_s == 2 * 2 * (900 + 60)
    assumed = add_up([line("a"), line("b"), fault()], checkpoint_every_s=600)
    assert (assumed.restart_s, assumed.checkpoints_lost_s) == (RESTART_S, 2 * (300 + RESTART_S))
    assert add_up([line()]).checkpoints_lost_s == 0


def test_money_is_for_all_ranks():
    report = add_up([line(compute=270, down=30)], price_per_h=2.5)
    assert report.money is not None
    assert report.money[Cause.DOWN] == pytest.approx(30 / 3600 * 8 * 2.5)
    assert add_up([line()]).money is None


def test_jobs_are_told_apart():
    lines = [line(job="j"), line(job="k", to=100), fault(job="k", at=10)]
    assert add_up(lines, "k").group_s == 100
    assert add_up(lines, "j").faults == []
    assert add_up(lines).by_group.keys() == {"j: a", "k: a"}
    assert add_up(lines).faults_by_group == {"j: a": 0, "k: a": 1}


@pytest.mark.parametrize(
    "bad",
    ["", "{", "[]", "3", '{"job":"j"}', line()[:40], line(compute=1).replace("compute", "x"), line(to=0.0), "null"],
)
def test_a_malformed_line_is_skipped(bad):
    assert add_up([bad, line()]).group_s == 300


def test_a_fault_counts_for_a_group_whose_name_ends_like_a_ranks():
    stall = fault("i2", kind="stall", group="pod/3/1")
    report = add_up([line("pod/3"), line("pod"), fault(group="pod/3"), stall])
    assert report.faults_by_group == {"pod/3": 2, "pod": 0}
