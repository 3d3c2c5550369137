import shutil
import subprocess
from dataclasses import replace
from enum import StrEnum

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lighthouse.job.records import Verdict
from lighthouse.server.metrics import METHODS, OTHER, REFUSALS, Counters, LighthouseCollector, render
from lighthouse_protocol.messages.session import QuorumPhase
from lighthouse_protocol.messages.status import LighthouseStatus, MemberState
from lighthouse_protocol.refusals import LighthouseError, WrongState
from tests.lighthouse.statuses import healing, job, member, status

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


def scrape(snapshot: LighthouseStatus, counters: Counters | None = None) -> str:
    registry = CollectorRegistry()
    registry.register(LighthouseCollector(lambda: snapshot, counters or Counters()))
    return render(registry)[0].decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and label values."""
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_sample_for_each_number_of_the_status():
    seen = samples(scrape(BUSY))
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
    seen = samples(scrape(status(job(member("a"), healing("b"), healing("c")))))
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
    seen = samples(scrape(BUSY))
    assert {word: seen[f"lighthouse_{name}", "default", word] for word in words} == {w: w in present for w in words}


def test_a_job_without_a_quorum_has_no_age():
    seen = samples(scrape(BUSY))
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
    seen = samples(scrape(BUSY, counters))
    assert {key[1] for key in seen if key[0] == "lighthouse_join_refusals_total"} == {*REFUSALS, OTHER}
    assert seen["lighthouse_join_refusals_total", "WrongState"] == seen["lighthouse_join_refusals_total", OTHER] == 1
    assert seen["lighthouse_grpc_calls_total", "ok", "Quorum"] == 1
    assert seen["lighthouse_grpc_calls_total", "deadline_exceeded", "Quorum"] == 1
    assert seen["lighthouse_grpc_calls_total", "unimplemented", OTHER] == 1
    assert {"Quorum", "Heartbeat", "Status", "Kill", "Drain", "Session"} < METHODS
    assert {"Rank", "Supervise", "PutKey", "GetKeys", "Runs", "StopRun", "ResumeRun"} < METHODS


def test_a_stall_lasts_for_seconds_and_none_lasts_for_none():
    seen = samples(scrape(status(replace(job(name="stuck"), stall="b/1 is behind", stall_s=31.5), job(name="moves"))))
    assert (seen["lighthouse_stalled_seconds", "stuck"], seen["lighthouse_stalled_seconds", "moves"]) == (31.5, 0)


def test_reads_the_snapshot_once_a_scrape_and_not_before():
    calls: list[int] = []

    def snapshot() -> LighthouseStatus:
        calls.append(1)
        return BUSY

    registry = CollectorRegistry()
    registry.register(LighthouseCollector(snapshot, Counters()))
    assert calls == []
    render(registry)
    assert calls == [1]


def test_the_content_type_is_that_of_the_text_format():
    body, content_type = render(CollectorRegistry())
    assert body == b""
    assert content_type.startswith("text/plain; version=")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_has_nothing_to_say():
    counters = Counters()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(BUSY, counters), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
