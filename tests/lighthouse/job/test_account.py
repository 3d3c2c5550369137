from lighthouse.job.incident_driver import MAX_HEALS_TOLD, JobAccount
from lighthouse_protocol.messages.progress import HealTotals
from lighthouse_protocol.messages.session import Discards, GroupCounts, GroupReport


def test_what_all_groups_report_is_added_up():
    account = JobAccount()
    for name in "ab":
        account.take(name, GroupReport(counts=GroupCounts()), 0.0)
        account.take(name, GroupReport(counts=GroupCounts(3, Discards(voted_no=1), 9.0, HealTotals(2, 4.0, 50))), 1.0)
    assert (account.commits, account.heal_bytes, account.ledger.step_s) == (6, 100, 18.0)
    assert account.discards == {"group_lost": 0, "rank_lost": 0, "revoked": 0, "voted_no": 2}
    assert (account.heals.count, account.heals.total) == (4, 8.0)
    assert dict(account.heals.buckets())["2.5"] == 4


def test_a_number_of_heals_that_cannot_be_right_does_not_hold_up_the_loop():
    account = JobAccount()
    account.take("a", GroupReport(counts=GroupCounts()), 0.0)
    account.take("a", GroupReport(counts=GroupCounts(healed=HealTotals(2**60, 1.0, 1))), 1.0)
    assert account.heals.count == MAX_HEALS_TOLD
