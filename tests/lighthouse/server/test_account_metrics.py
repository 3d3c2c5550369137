"""The numbers of a job that has just come are there, with zeros: a first failure is a rise."""

import pytest
from prometheus_client import CollectorRegistry

from lighthouse.job.incident_driver import JobAccount
from lighthouse.server.metrics import AccountCollector, render
from lighthouse_protocol.messages.session import GroupCounts, GroupReport, HeldQuorum, HoldState
from tests.lighthouse.server.test_metrics import samples


def scrape(account: JobAccount, now: float = 0.0) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(AccountCollector(lambda: {"j": account}, lambda: now))
    return samples(render(registry)[0].decode())


def test_all_counters_begin_at_zero():
    seen = scrape(JobAccount())
    for name in ("commits", "heals", "heal_bytes", "committed_step_seconds", "group_seconds"):
        assert seen[f"lighthouse_{name}_total", "j"] == 0
    for reason in ("group_lost", "rank_lost", "revoked", "voted_no"):
        assert seen["lighthouse_discards_total", "j", reason] == 0
    assert seen["lighthouse_heal_seconds_count", "j"] == seen["lighthouse_quorum_wait_seconds_count", "j"] == 0
    assert ("lighthouse_goodput_ratio", "j") not in seen


def test_goodput_is_there_once_a_group_has_trained():
    account = JobAccount()
    for commits in range(2):
        held = HeldQuorum(1, HoldState.STANDING, commits)
        account.take("a", GroupReport(held, counts=GroupCounts(commits, step_s=6.0 * commits)), 10.0 * commits)
    seen = scrape(account, now=12.0)
    assert (seen["lighthouse_commits_total", "j"], seen["lighthouse_committed_step_seconds_total", "j"]) == (1, 6.0)
    assert (seen["lighthouse_group_seconds_total", "j"], seen["lighthouse_goodput_ratio", "j"]) == (12.0, 0.5)


def test_the_wait_for_a_quorum_is_a_histogram():
    account = JobAccount()
    for seconds in (0.001, 0.3, 0.5, 1000.0):
        account.waits.add(seconds)
    seen = scrape(account)
    buckets = {key[2]: value for key, value in seen.items() if key[0] == "lighthouse_quorum_wait_seconds_bucket"}
    assert [buckets[bound] for bound in ("0.001", "0.25", "0.5", "300.0", "+Inf")] == [1, 1, 3, 3, 4]
    assert seen["lighthouse_quorum_wait_seconds_sum", "j"] == pytest.approx(1000.801)
