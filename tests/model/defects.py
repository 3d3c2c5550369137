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
    Defect("tells_before_writing", "S1", DISK, "written-after-telling"),
    Defect("tells_before_writing", "S1", LEADERS, "said-before-written"),
    Defect("no_clock ignores_seen_ids", "S1", ROLLED_BACK, "id-reused an-id-after-a-restart-again"),
    Defect("no_clock ignores_seen_ids", "S2", ROLLED_BACK, "id-goes-back an-id-below-what-was-seen the-seen-id-again"),
    Defect("same_id_again", "S1", QUIET, "old-id-again the-id-stays-after-standing the-id-stays-for-another-list"),
    Defect("leads_on", "S1", LEADERS, "leads-on"),
    Defect("unguarded_writes", "S1", LEADERS, "writes-unguarded"),
    Defect("grants_after_lease", "S3", CUT, "grant-after-lease grants-without-a-lease offers-without-a-lease"),
    Defect("ends_leases_early", "S3", CUT, "clock-sleeps the-whole-lease no-renewal no-lease-at-the-start"),
    Defect("forms_before_lease_end", "S3", CUT, "formed-before-lease-end free-with-the-first-lease"),
    Defect("common_by_name", "S3", _two(2, kill=1, cut=1), "intersection-by-name member-by-name-only"),
    Defect("forgets_leases", "S3", STOP, "shorter-lease no-lease-after-a-restart"),
    Defect(
        "forms_while_one_is_away",
        "S3",
        _two(2, stop_lighthouse=1, fail=1),
        "formed-while-one-is-away one-that-is-away-is-not-waited-for",
    ),
    Defect("forms_over_unknown", "S3", ROLLED_BACK, "a-forgotten-job-forms-at-once"),
    Defect("unapplied_unnoticed", "S3", _two(2, skip=1), "commit-not-applied"),
    Defect("contributes_before_healing", "S3", QUIET),
    Defect("reduces_without_one", "S4", QUIET),
    Defect("commits_without_sum", "S4", QUIET),
    Defect("grants_before_commit", "S4", QUIET, "grants-what-is-not-committed offers-before-the-commit"),
    Defect("resumes_too_low", "S6", THREE, "resumed-too-low resumes-up-to-the-lowest"),
    Defect("resumes_at_once", "S6", THREE, "resumes-before-all-have-told"),
    Defect("ignores_recalls", "L2", QUIET, "a-recall-is-ignored frozen-grants"),
    Defect("ignores_revokes", "L1", CUT, "revoked-grants a-foreign-quorum-is-not-revoked"),
    Defect("dead_counts_as_alive", "L1", _two(2, vanish=1), "dead-counts-as-alive a-lost-member-does-not-end-it"),
    Defect("keeps_the_lost", "S7", _two(2, vanish=1), "a-withdrawn-call-stays"),
    Defect("stands_before_all_are_back", "S9", STOP, "all-are-back-at-once back-with-the-first"),
    Defect("torn_contributes", "S10", _two(2, skip=1), "a-torn-rank-is-granted"),
    Defect("gives_up_beside_a_peer", "S11", _two(2, skip=1), "state-of-a-peer-given-up"),
    Defect("joins_once", "L1", CUT, "join-lost-in-a-restart"),
    Defect("ignores_newcomers", "L1", QUIET),
    Defect("never_resumes", "L2", QUIET),
    Defect("no_revoke_after_a_discard", "L1", _two(2, fail=1), "a-failed-commit-recalls a-failed-commit-is-ignored"),
    Defect(
        "new_manager_is_a_stranger",
        "S14",
        _two(1, restart_manager=1, fail=1),
        "a-new-manager-is-a-stranger",
    ),
)

BELOW_THE_MODEL = {
    "several ranks in a group": ("vote-for-another-quorum", "yes-of-one-of-several", "half-a-group-joins"),
    "two processes under one name": ("another-session-ends-the-lease", "impostor-is-taken", "anybody-is-admitted"),
    "lengths of time": ("newcomers-clock", "calls-never-expire", "closings-judged-alone"),
    "how connections end: a group has one link": ("end-is-a-leave", "old-end-ends-newer"),
    "the short form of a quorum": ("only-newcomers-are-a-change",),
    "groups that heal beside their steps": ("catching-up-contributes", "return-refused"),
    "gradients, and when they are scaled": ("gradient-of-the-old-state",),
    "when in a step a rank votes, and what a manager refuses": ("told-late-ends-the-step", "told-late-is-refused"),
    "quorums that do not stand, or have a limited size": ("unwatched-for-ever", "recall-for-nothing"),
    "what the lighthouse remembers of lost groups": ("nobody-forgotten",),
    "the end of a script": ("end-is-a-loss", "released-at-once", "ended-for-a-later-grant"),
    "messages that no correct process sends": ("obeys-any-order", "tag-alone-counts"),
}
"""The simulator's planted defects that the model cannot express, by what it leaves out."""
