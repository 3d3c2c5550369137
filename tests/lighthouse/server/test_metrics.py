"""The lighthouse's metrics, as a scrape shows them."""

import shutil
import subprocess
from enum import StrEnum

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lighthouse.job.incident_driver import BOUNDS_S, IncidentTimes, JobAccount
from lighthouse.job.records import Group, Verdict
from lighthouse.job.restarts import Supervisors
from lighthouse.server.metrics import METHODS, OTHER, REFUSALS, Counters, Scrape, render
from lighthouse_protocol.messages.incident import IncidentKind
from lighthouse_protocol.messages.run import (
    RunCounters,
    RunStatus,
    RunStopped,
    RunTerms,
    SupervisorHeartbeat,
    SupervisorHello,
)
from lighthouse_protocol.messages.session import GroupCounts, GroupReport, HeldQuorum, HoldState, QuorumPhase
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState
from lighthouse_protocol.refusals import LighthouseError, WrongState
from tests.lighthouse.statuses import healing, job, member, run_of, status

BUSY = status(
    job(
        member("a", step=9),
        member("b", MemberState.JOINED, step=8),
        member("c", MemberState.EXPIRED, is_participant=False, step=11),
        quorum_id=1763719200123,
        verdict="waiting_for_stragglers",
    ),
    job(name='odd "job"\n\\', quorum_id=0, verdict="no_joins", phase="none"),
)


def samples(snapshot: LighthouseStatus = BUSY, **fields: object) -> dict[tuple[str, ...], float]:
    """Values of a scrape by name and label values."""
    families = text_string_to_metric_families(render(Scrape(snapshot, **fields))[0].decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_sample_for_each_number_of_the_status():
    seen = samples()
    of_lighthouse = {"up": 1, "uptime_seconds": 4000}
    of_job = {
        "quorum_id": 1763719200123,
        "quorum_age_seconds": 193.2,
        "participants": 2,
        "quorum_step": 9,
        "quorums_formed_total": 3,
        "quorum_rounds_total": 1234,
        "sessions": 3,
        "quorum_recalls_total": 5,
        "quorum_revocations_total": 6,
    }
    assert {name: seen[f"lighthouse_{name}",] for name in of_lighthouse} == of_lighthouse
    assert {name: seen[f"lighthouse_{name}", "default"] for name in of_job} == of_job
    assert seen["lighthouse_info", "0.1.0"] == 1
    assert (
        seen["lighthouse_heal_remaining_bytes", "default"] == seen["lighthouse_heal_bytes_per_second", "default"] == 0
    )


def test_heals_that_go_on_are_added_up():
    seen = samples(status(job(member("a"), healing("b"), healing("c"))))
    assert seen["lighthouse_heal_remaining_bytes", "default"] == 2 * (4 * 2**30 - 1_288_490_189)
    assert seen["lighthouse_heal_bytes_per_second", "default"] == 2 * 98 * 2**20
    assert seen["lighthouse_members", "default", "healing"] == 2


@pytest.mark.parametrize(
    ("name", "words", "present"),
    [
        ("members", MemberState, {MemberState.PARTICIPANT, MemberState.JOINED, MemberState.EXPIRED}),
        ("quorum_verdict", Verdict, {Verdict.WAITING_FOR_STRAGGLERS}),
        ("quorum_phase", QuorumPhase, {QuorumPhase.STANDING}),
    ],
)
def test_every_word_of_a_closed_set_is_there(name: str, words: type[StrEnum], present: set[StrEnum]):
    seen = samples()
    assert {word: seen[f"lighthouse_{name}", "default", word] for word in words} == {w: w in present for w in words}


def test_a_job_without_a_quorum_has_no_age():
    seen = samples()
    odd = 'odd "job"\n\\'
    assert seen["lighthouse_quorum_id", odd] == 0
    assert ("lighthouse_quorum_age_seconds", odd) not in seen


def test_counts_refusals_and_calls_from_closed_sets():
    counters = Counters()
    counters.refused(WrongState("no"))
    counters.refused(LighthouseError("of a kind that has no name here"))
    counters.called("Quorum", grpc.StatusCode.OK)
    counters.called("Quorum", grpc.StatusCode.DEADLINE_EXCEEDED)
    counters.called("Guess", grpc.StatusCode.UNIMPLEMENTED)
    seen = samples(counters=counters)
    assert {key[1] for key in seen if key[0] == "lighthouse_join_refusals_total"} == {*REFUSALS, OTHER}
    assert seen["lighthouse_join_refusals_total", "WrongState"] == seen["lighthouse_join_refusals_total", OTHER] == 1
    assert seen["lighthouse_grpc_calls_total", "ok", "Quorum"] == 1
    assert seen["lighthouse_grpc_calls_total", "deadline_exceeded", "Quorum"] == 1
    assert seen["lighthouse_grpc_calls_total", "unimplemented", OTHER] == 1
    assert {"Quorum", "Heartbeat", "Status", "Kill", "Drain", "Session"} < METHODS
    assert {"Rank", "Supervise", "PutKey", "GetKeys", "Runs", "StopRun", "ResumeRun"} < METHODS


def test_a_stall_lasts_for_seconds_and_none_lasts_for_none():
    seen = samples(status(job(name="stuck", stall="b/1 is behind", stall_s=31.5), job(name="moves")))
    assert (seen["lighthouse_stalled_seconds", "stuck"], seen["lighthouse_stalled_seconds", "moves"]) == (31.5, 0)


def test_the_content_type_is_that_of_the_text_format():
    _, content_type = render(Scrape(BUSY))
    assert content_type.startswith("text/plain; version=")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_has_nothing_to_say():
    text, _ = render(Scrape(BUSY))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_stopped_run_without_processes():
    stop = RunStopped("exit code 130", "g0", 1)
    run = RunStatus("j", "r", "stopped", RunCounters(), RunTerms(3), (), False, stop, (), (), ())
    seen = samples(runs=[run])
    assert (seen["lighthouse_run_stopped", "j", "r"], seen["lighthouse_run_supervisors", "j", "r"]) == (1, 0)


def test_the_budget_that_is_used_up_the_most():
    stage = Supervisors()
    for number, (name, used) in enumerate({"a": 0.25, "b": 0.75}.items()):
        stage.admit_supervisor(SupervisorHello(name, f"{name}1"), number)
        stage.receive_heartbeat(number, SupervisorHeartbeat(used))
    assert stage.budget_used == 0.75
    stage.end_stream(1)
    assert stage.budget_used == 0.25


def test_times_by_job_and_kind():
    times = IncidentTimes()
    times.add_detect_time("j", IncidentKind.STALL, 61.0)
    times.add_detect_time("j", IncidentKind.LOSS, 0.0)
    times.add_detect_time("j", IncidentKind.LOSS, 0.04)
    times.add_recover_time("j", IncidentKind.LOSS, 700.0)
    seen = samples(status(job(name="j")), incidents=times)
    assert seen["lighthouse_incident_detection_seconds_count", "j", "loss"] == 2
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "loss", "0.01"] == 1
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "stall", "60.0"] == 0
    assert seen["lighthouse_incident_detection_seconds_bucket", "j", "stall", "120.0"] == 1
    assert seen["lighthouse_incident_recovery_seconds_bucket", "j", "loss", "600.0"] == 0
    assert seen["lighthouse_incident_recovery_seconds_sum", "j", "loss"] == 700.0
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.01, 600.0)


def test_a_job_without_an_incident_has_zeros_for_every_kind():
    times = IncidentTimes()
    times.count_opened("j", IncidentKind.LOSS)
    seen = samples(status(job(name="j"), job(name="new")), incidents=times)
    counted = {kind: seen["lighthouse_incidents_total", "j", kind] for kind in IncidentKind}
    assert counted == dict.fromkeys(IncidentKind, 0) | {IncidentKind.LOSS: 1}
    assert [seen["lighthouse_incidents_total", "new", kind] for kind in IncidentKind] == [0] * len(IncidentKind)
    assert seen["lighthouse_incident_recovery_seconds_count", "new", "stall"] == 0


def test_series_of_incidents_go_with_the_job_and_its_runs():
    times = IncidentTimes()
    times.count_opened("default", IncidentKind.RESTART)
    of_run = samples(status(), incidents=times, runs=[run_of("active")])
    assert of_run["lighthouse_incidents_total", "default", "restart"] == 1
    assert not any("default" in labels for labels in samples(status(job(name="new")), incidents=times))


def test_all_counters_begin_at_zero():
    seen = samples(accounts={"j": JobAccount({})})
    for name in ("commits", "heals", "heal_bytes", "committed_step_seconds", "group_seconds"):
        assert seen[f"lighthouse_{name}_total", "j"] == 0
    for reason in ("group_lost", "rank_lost", "revoked", "voted_no"):
        assert seen["lighthouse_discards_total", "j", reason] == 0
    assert seen["lighthouse_heal_seconds_count", "j"] == seen["lighthouse_quorum_wait_seconds_count", "j"] == 0
    assert ("lighthouse_goodput_ratio", "j") not in seen


def test_goodput_is_there_once_a_group_has_trained():
    account = JobAccount({"a": Group("a", "i1", 0.0)})
    for commits in range(2):
        held = HeldQuorum(1, HoldState.STANDING, commits)
        account.add_report("a", GroupReport(held, counts=GroupCounts(commits, step_s=6.0 * commits)), 10.0 * commits)
    seen = samples(accounts={"j": account}, now=12.0)
    assert (seen["lighthouse_commits_total", "j"], seen["lighthouse_committed_step_seconds_total", "j"]) == (1, 6.0)
    assert (seen["lighthouse_group_seconds_total", "j"], seen["lighthouse_goodput_ratio", "j"]) == (12.0, 0.5)


def test_the_wait_for_a_quorum_is_a_histogram():
    account = JobAccount({})
    for seconds in (0.001, 0.3, 0.5, 1000.0):
        account.waits.add(seconds)
    seen = samples(accounts={"j": account})
    buckets = {key[2]: value for key, value in seen.items() if key[0] == "lighthouse_quorum_wait_seconds_bucket"}
    assert [buckets[bound] for bound in ("0.001", "0.25", "0.5", "300.0", "+Inf")] == [1, 1, 3, 3, 4]
    assert seen["lighthouse_quorum_wait_seconds_sum", "j"] == pytest.approx(1000.801)
