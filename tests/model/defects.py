"""Planted defects: a rule that the model leaves out, the promise that breaks, and the bounds under which it is found.

`stands_for` names the same defect where it is planted in the product: the simulator's planted defects, and the mutants
of lighthouse/job/standing.py, lighthouse/job/lineage.py and the manager's grants (tests/mutants/modules).
"""

from typing import NamedTuple

from tests.model.bounds import Bounds


class Defect(NamedTuple):
    weak: str  # names of left-out rules, separated by spaces
    promise: str
    bounds: Bounds
    stands_for: str = ""


def _two(last_step: int, **faults: int) -> Bounds:
    return Bounds(2, last_step, faults)


QUIET = _two(2)
THREE = Bounds(3, 2)
CUT = _two(2, cut=1)
STOP = _two(2, stop_lighthouse=1)
DISK = Bounds(2, 2, {"stop_lighthouse": 1, "kill": 1}, delays_writes=True)
LEADERS = Bounds(2, 2, {"stop_lighthouse": 1}, lighthouses=2, delays_writes=True)
ROLLED_BACK = _two(2, stop_lighthouse=1, roll_back=1)

DEFECTS = (
    Defect("tells_before_writing", "S1", DISK, "told-before-it-is-written"),
    Defect("tells_before_writing", "S1", LEADERS, "passes-what-is-held"),
    Defect("no_clock ignores_seen_ids", "S1", ROLLED_BACK, "ids-begin-again an-id-after-a-restart-again"),
    Defect("no_clock ignores_seen_ids", "S2", ROLLED_BACK, "ids-go-back an-id-below-what-was-seen the-seen-id-again"),
    Defect("same_id_again", "S1", QUIET, "the-id-stays-after-standing the-id-stays-for-another-list"),
    Defect("leads_on", "S1", LEADERS, "leads-by-its-role"),
    Defect("unguarded_writes", "S1", LEADERS, "writes-are-unguarded"),
    Defect("grants_after_lease", "S3", CUT, "grants-without-a-lease offers-without-a-lease"),
    Defect("ends_leases_early", "S3", CUT, "the-clock-sleeps the-whole-lease no-renewal no-lease-at-the-start"),
    Defect("forms_before_lease_end", "S3", CUT, "formed-before-the-leases-end free-with-the-first-lease"),
    Defect("common_by_name", "S3", _two(2, kill=1, cut=1), "member-by-name-only"),
    Defect("forgets_leases", "S3", STOP, "the-wait-is-for-its-own-lease no-lease-after-a-restart"),
    Defect(
        "forms_while_one_is_away",
        "S3",
        _two(2, stop_lighthouse=1, fail=1),
        "one-that-is-away-is-not-waited-for",
    ),
    Defect("forms_over_unknown", "S3", ROLLED_BACK, "a-forgotten-job-forms-at-once"),
    Defect("unapplied_unnoticed", "S3", _two(2, skip=1), "a-commit-that-was-not-applied-goes-unnoticed"),
    Defect("contributes_before_healing", "S3", QUIET),
    Defect("reduces_without_one", "S4", QUIET),
    Defect("commits_without_sum", "S4", QUIET),
    Defect("grants_before_commit", "S4", QUIET, "grants-what-is-not-committed offers-before-the-commit"),
    Defect("resumes_too_low", "S6", THREE, "resumes-up-to-the-lowest"),
    Defect("resumes_at_once", "S6", THREE, "resumes-before-all-have-told"),
    Defect("ignores_recalls", "L2", QUIET, "a-recall-is-ignored frozen-grants"),
    Defect("ignores_revokes", "L1", CUT, "revoked-grants a-foreign-quorum-is-not-revoked"),
    Defect("dead_counts_as_alive", "L1", _two(2, vanish=1), "an-end-goes-unnoticed a-lost-member-does-not-end-it"),
    Defect("keeps_the_lost", "S7", _two(2, vanish=1), "a-withdrawn-call-stays"),
    Defect("stands_before_all_are_back", "S9", STOP, "all-are-back-at-once back-with-the-first"),
    Defect("broken_heal_unnoticed", "S3", _two(2, fail=1)),
    Defect("torn_contributes", "S10", _two(2, skip=1), "a-torn-rank-is-granted"),
    Defect("gives_up_beside_a_peer", "S11", _two(2, skip=1), "ends-though-its-peers-are-away"),
    Defect("joins_once", "L1", CUT, "a-join-is-lost-in-a-restart"),
    Defect("ignores_newcomers", "L1", QUIET),
    Defect("never_resumes", "L2", QUIET),
    Defect("no_revoke_after_a_discard", "L1", _two(2, fail=1), "a-failed-commit-recalls a-failed-commit-is-ignored"),
    Defect(
        "new_manager_is_a_stranger",
        "S14",
        _two(1, restart_manager=1, fail=1),
        "a-new-manager-is-a-stranger",
    ),
    Defect("a_branch_wins", "S14", _two(2, kill=1, cut=1), "a-branch-wins"),
)

BELOW_THE_MODEL = {
    "several ranks in a group": ("a-yes-counts-for-the-next-quorum", "one-yes-decides", "half-a-group-joins"),
    "two processes of a name": (
        "another-session-ends-the-lease",
        "an-incarnation-is-enough",
        "anybody-is-admitted",
    ),
    "lengths of time": (
        "a-branch-begins-beside-live-holders",
        "a-newcomer-starts-the-clock",
        "calls-never-expire",
        "closings-judged-alone",
    ),
    "how connections end: a group has one link": ("an-end-counts-as-a-leave", "an-old-end-ends-the-newer-session"),
    "the short form of a quorum": ("only-newcomers-are-a-change",),
    "groups that heal beside their steps": ("a-catching-up-group-contributes", "a-return-is-refused"),
    "gradients, and when they are scaled": ("gradient-of-the-old-state",),
    "when a rank votes, and refusals": (
        "a-late-quorum-is-granted-on",
        "late-is-taken-for-up-to-date",
    ),
    "quorums that do not stand, or have a limited size": ("unwatched-for-ever", "recalled-for-nothing"),
    "what the lighthouse remembers of lost groups": ("never-forgotten",),
    "the end of a script": ("an-end-is-a-loss", "released-at-once", "resumed-above-the-last-step"),
    "messages that no correct process sends": ("obeys-for-another-quorum", "the-tag-alone-counts"),
}
"""The simulator's planted defects that the model cannot express, by what it leaves out."""
