"""The exhibits, by the rule whose checker finds them."""

from typing import Any

from tests.simulation.museum import lighthouse_defects as lighthouse
from tests.simulation.museum import manager_defects as manager
from tests.simulation.museum import rank_defects as rank
from tests.simulation.museum import two_lighthouses_defects as two
from tests.simulation.museum.exhibit import Exhibit, Recipe

ANY_SIZE = {"min_replicas": 1, "active": None, "allowed_sizes": frozenset[int]()}
# One group trains, the other waits as a spare: no quorum without the first has a member in common with the present one.
ONE_AND_A_SPARE = {**ANY_SIZE, "active": 1}
SHORT = {"join_timeout_s": 1.5, "heartbeat_timeout_s": 1.5, "lease_s": 1.5}
LONG_LEASE = {"heartbeat_timeout_s": 1.5, "lease_s": 10.0}
# What is found only at the end of a run is found sooner where everything that may take its time takes little.
QUICK = {
    "step_s": 0.5,
    "collective_timeout_s": 2.0,
    "heal_timeout_s": 2.0,
    "vote_timeout_s": 2.0,
    "group_world_size": 1,
}
LONG_STEPS = {"restart_s": 0.3, "step_s": 5.0, "step_spread": 0.02, "group_world_size": 1}
PATIENT = {"collective_timeout_s": 12.0, "heal_timeout_s": 12.0}


def _storm(*mix: str, config: dict[str, Any], **plan: Any) -> Recipe:
    native = {"mix": mix, "torchft": 0, "fault_every_s": 1.0, "catch_up": 0.0, "skips": 0.0, **plan}
    return Recipe("storm", native, {"stands": True, **config})


def _two(*mix: str) -> Recipe:
    return Recipe("two_lighthouses", {"mix": mix, "fault_every_s": 1.0, "step_s": 0.2, "catch_up": 0.0}, ANY_SIZE)


# A manager is paused and its group started again, while the paused one may hold a lease.
RESTARTED_BESIDE_ITSELF = _storm(
    *3 * ("pause_manager",),
    "kill_group",
    config={**ANY_SIZE, **LONG_LEASE},
    groups=2,
    restart_s=0.05,
    step_s=0.1,
    fault_every_s=0.5,
)

EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit(
        "written-after-telling",
        "a quorum is written down after its members have been told",
        "S1",
        _storm("kill_group", config=ANY_SIZE),
        lighthouse.WRITTEN_AFTER_TELLING,
    ),
    Exhibit(
        "only-newcomers-are-a-change",
        "of what has changed a manager takes the newcomers alone, and does not look what comes of it",
        "S1",
        _storm("kill_group", config=ANY_SIZE),
        manager.NEWCOMERS_ALONE,
    ),
    Exhibit(
        "id-reused",
        "without its journal the lighthouse begins again at its first id, whatever members hold (torchft's defect 4)",
        "S1",
        _storm("lose_journal", "kill_group", config=ANY_SIZE),
        lighthouse.ID_REUSED,
    ),
    Exhibit(
        "old-id-again",
        "a quorum is formed again under its old id after a recall",
        "S1",
        _storm("stranger", config=ANY_SIZE, step_s=1.0),
        lighthouse.SAME_ID_AGAIN,
    ),
    Exhibit(
        "id-goes-back",
        "without its journal the lighthouse begins at a lower id, whatever members hold",
        "S2",
        _storm("lose_journal", "kill_group", config=ANY_SIZE),
        lighthouse.ID_GOES_BACK,
    ),
    Exhibit(
        "grant-after-lease",
        "a manager grants steps after its lease has run out",
        "S3",
        _storm("cut_lighthouse", config={**ONE_AND_A_SPARE, **SHORT}, groups=2, step_s=0.1),
        manager.LEASE_NEVER_ENDS,
    ),
    Exhibit(
        "clock-sleeps",
        "the clock by which a manager counts its lease stands still while its machine is suspended",
        "S3",
        _storm("pause_beyond_lease", config={**ONE_AND_A_SPARE, **SHORT}, groups=2, step_s=0.1),
        manager.CLOCK_SLEEPS,
    ),
    Exhibit(
        "formed-before-lease-end",
        "a quorum without a member of the present one forms before the leases of that one have run out",
        "S3",
        _storm("cut_lighthouse", config={**ONE_AND_A_SPARE, **LONG_LEASE}, groups=2, step_s=0.1),
        lighthouse.FREE_AT_ONCE,
        range(34, 60),
    ),
    Exhibit(
        "intersection-by-name",
        "a restarted group counts as a member of the quorum that its earlier incarnation was in",
        "S3",
        RESTARTED_BESIDE_ITSELF,
        lighthouse.FREE_BY_NAME,
        range(60),
    ),
    Exhibit(
        "another-session-ends-the-lease",
        "a manager that opens a session with new ranks ends the lease of the one that had its name",
        "S3",
        RESTARTED_BESIDE_ITSELF,
        lighthouse.ANOTHER_SESSION_ENDS_THE_LEASE,
        range(60),
    ),
    Exhibit(
        "shorter-lease",
        "a restarted lighthouse waits for its own, shorter lease, not for the one that it had given",
        "S3",
        _storm(
            *3 * ("cut_lighthouse",),
            "change_lease",
            config={**ONE_AND_A_SPARE, **SHORT, "lease_s": 6.0},
            groups=2,
            step_s=0.1,
            fault_every_s=2.0,
        ),
        lighthouse.SHORTER_LEASE,
        range(120, 180),
    ),
    Exhibit(
        "formed-while-one-is-away",
        "after a restart a member of the quorum in the journal forms the next one, though others are not back",
        "S3",
        _storm(
            "kill_lighthouse",
            *3 * ("fail_step",),
            config={**ANY_SIZE, "heartbeat_timeout_s": 5.0, "lease_s": 5.0},
            groups=3,
            group_world_size=1,
            step_s=0.5,
            fault_every_s=0.5,
        ),
        lighthouse.FREE_WHILE_ONE_IS_AWAY,
    ),
    Exhibit(
        "catching-up-contributes",
        "a group that catches up counts as a contributor after the step that its quorum was formed for",
        "S3",
        _storm("kill_group", config=ANY_SIZE, catch_up=1.0, step_s=0.1, heal_s=1.5, groups=3),
        manager.CATCHING_UP_CONTRIBUTES,
    ),
    Exhibit(
        "gradient-of-the-old-state",
        "a rank that heals applies a gradient that was transformed by its old state",
        "S3",
        _storm("kill_group", config=ANY_SIZE, step_s=0.1, groups=3),
        rank.INSTALLS_BEFORE_ITS_VOTE,
        range(6),
    ),
    Exhibit(
        "commit-not-applied",
        "a rank that has committed a step and not applied it goes on under the new tag",
        "S3",
        _storm("kill_group", config=ANY_SIZE, groups=3, skips=0.02, step_s=0.1),
        rank.NOT_APPLIED_UNNOTICED,
        range(4),
    ),
    Exhibit(
        "vote-for-another-quorum",
        "a yes counts for the same step under the next quorum, too (torchft's defect 1)",
        "S4",
        _storm("fail_step", "cancel_vote", "pause_rank", config=ANY_SIZE, group_world_size=3, step_s=0.05),
        manager.VOTE_FOR_ANOTHER_QUORUM,
    ),
    Exhibit(
        "yes-of-one-of-several",
        "a rank takes its own yes for the decision, though its group has others",
        "S4",
        _storm("fail_step", config=ANY_SIZE, group_world_size=3, step_s=0.05),
        rank.YES_OF_ONE_DECIDES,
    ),
    Exhibit(
        "recall-for-nothing",
        "a quorum is recalled for a newcomer that it has no place for",
        "S5",
        _storm("drain", config={**SHORT, **ANY_SIZE, "active": 2}, groups=3, **QUICK),
        lighthouse.RECALL_FOR_NOTHING,
    ),
    Exhibit(
        "newcomers-clock",
        "join_timeout counts from a newcomer's join while members are in a long step",
        "S5",
        _storm("kill_rank", config={**SHORT, **ANY_SIZE, "stands": False}, groups=5, **LONG_STEPS, **PATIENT),
        lighthouse.NEWCOMERS_CLOCK,
        range(40),
    ),
    Exhibit(
        "half-a-group-joins",
        "a manager joins as soon as one of its ranks has asked",
        "S4",
        _storm(
            "kill_rank",
            "kill_group",
            config={**SHORT, **ANY_SIZE},
            **{**QUICK, "group_world_size": 3},
        ),
        manager.HALF_A_GROUP_JOINS,
        range(12),
    ),
    Exhibit(
        "join-lost-in-a-restart",
        "a join that waits is not asked again on the next session",
        "S5",
        _storm("kill_lighthouse", "kill_group", config={**SHORT, **ANY_SIZE}, quorum_timeout_s=600.0, **QUICK),
        manager.JOIN_LOST,
    ),
    Exhibit(
        "calls-never-expire",
        "a manager leaves a rank's call unanswered when its time is over",
        "S5",
        _storm("kill_lighthouse", "kill_group", config={**SHORT, **ANY_SIZE}, quorum_timeout_s=2.0, **QUICK),
        manager.CALLS_NEVER_EXPIRE,
    ),
    Exhibit(
        "unwatched-for-ever",
        "a group of which a rank was started again counts as unwatched, and no quorum with it stands",
        "S5",
        _storm("kill_rank", config={**SHORT, **ANY_SIZE}, **QUICK),
        manager.UNWATCHED_FOR_EVER,
        range(2),
    ),
    Exhibit(
        "resumed-too-low",
        "after a recall the members are resumed up to the lowest grant, not the highest",
        "S6",
        Recipe("graceful"),
        lighthouse.RESUMED_TOO_LOW,
    ),
    Exhibit(
        "dead-counts-as-alive",
        "the end of a session is no loss; only silence is (torchft's defect 11)",
        "S7",
        Recipe("losses", {"mix": ("kill_group", "kill_manager")}),
        lighthouse.END_UNNOTICED,
    ),
    Exhibit(
        "told-late-ends-the-step",
        "a group that is told to heal when it has begun to compute ends its peers' step by its no",
        "S7",
        Recipe("losses", {"mix": ("pause_group",), "group_world_size": 2, "catch_up": 0.0, "step_s": 0.05}),
        manager.LATE_NO_ENDS_THE_QUORUM,
    ),
    Exhibit(
        "nobody-forgotten",
        "ids that have gone are remembered for ever (torchft's defect 12)",
        "S8",
        Recipe("churn"),
        lighthouse.NOBODY_FORGOTTEN,
        range(3),
    ),
    Exhibit(
        "tag-alone-counts",
        "a group that names the id of the present quorum is taken for one that has trained under it",
        "S3",
        Recipe("churn"),
        lighthouse.TAG_ALONE_COUNTS,
        range(3),
    ),
    Exhibit(
        "end-is-a-leave",
        "a clean end of a stream counts as a leave",
        "S9",
        Recipe("restarts", {"mix": ("pause_lighthouse",)}, {"lease_s": 1.5, "heartbeat_timeout_s": 1.5}),
        lighthouse.END_IS_A_LEAVE,
    ),
    Exhibit(
        "closings-judged-alone",
        "connections that something on the way has cut all at once count as so many deaths",
        "S9",
        Recipe("restarts", {"mix": ("close_shortly",)}),
        lighthouse.CLOSINGS_ALONE,
    ),
    Exhibit(
        "old-end-ends-newer",
        "the end of a group's old session ends its newer one",
        "S9",
        Recipe("restarts", {"mix": ("pause_lighthouse",)}, {"lease_s": 1.5, "heartbeat_timeout_s": 1.5}),
        lighthouse.OLD_SESSION_ENDS_NEWER,
    ),
    Exhibit(
        "told-late-is-refused",
        "a group with a rank without a state, and another that has begun to compute, is refused beside a sound peer",
        "S11",
        _storm("kill_group", config=ANY_SIZE, groups=3, skips=0.02, step_s=0.1),
        manager.LATE_IS_REFUSED,
        range(40),
    ),
    Exhibit(
        "state-of-a-peer-given-up",
        "a group that has torn its state ends though a peer holds it that is only cut off",
        "S11",
        _storm("cut_lighthouse", config={**ANY_SIZE, **SHORT}, groups=3, skips=0.1, step_s=0.25),
        manager.PEERS_FORGOTTEN,
    ),
    Exhibit(
        "return-refused",
        "a manager refuses a group that leaves off catching up and asks at the step that it holds",
        "S11",
        _storm("kill_group", "kill_lighthouse", config=ANY_SIZE, catch_up=1.0, breaks=0.3, step_s=0.1, groups=3),
        manager.RETURN_REFUSED,
        range(40),
    ),
    Exhibit(
        "end-is-a-loss",
        "a group whose script has ended counts as lost to those that are still in its last step",
        "S12",
        Recipe("graceful"),
        manager.END_IS_A_LOSS,
    ),
    Exhibit(
        "released-at-once",
        "a rank whose script has ended does not stay for its peers",
        "S12",
        Recipe("graceful"),
        manager.RELEASED_AT_ONCE,
    ),
    Exhibit(
        "ended-for-a-later-grant",
        "a member that was granted a step after the last one ends the quorum while others are in that one",
        "S12",
        Recipe("graceful", {"groups": 6, "group_world_size": 1, "step_s": 0.5, "delay_s": 0.0005, "wants_next": 1.0}),
        lighthouse.ENDED_FOR_A_LATER_GRANT,
        range(26, 50),
    ),
    Exhibit(
        "anybody-is-admitted",
        "the lighthouse admits whoever comes",
        "S13",
        Recipe("misfits"),
        lighthouse.ANYBODY_IS_ADMITTED,
    ),
    Exhibit(
        "impostor-is-taken",
        "the lighthouse takes whoever shows a group's incarnation for its manager",
        "S13",
        Recipe("misfits"),
        lighthouse.IMPOSTOR_IS_TAKEN,
    ),
    Exhibit(
        "obeys-any-order",
        "a manager obeys an order about another quorum than its own",
        "S13",
        Recipe("misfits"),
        manager.OBEYS_ANY_ORDER,
    ),
    Exhibit(
        "leads-on",
        "a leader that the store has not answered goes on, until it is told of another one",
        "S1",
        _two("stop_leader", "cut_leader_from_store"),
        two.NO_FENCE,
    ),
    Exhibit(
        "writes-unguarded",
        "what a leader writes is not guarded by the leader's key",
        "S1",
        _two("cut_leader_from_store", "kill_group", "kill_rank"),
        two.UNGUARDED_WRITES,
    ),
    Exhibit(
        "said-before-written",
        "what the leader says does not wait for the store",
        "S1",
        _two("kill_group", "stop_store"),
        two.SAID_BEFORE_WRITTEN,
    ),
    Exhibit(
        "a-new-manager-is-a-stranger",
        "a group whose manager was started again below its ranks is sent back to what the other members hold",
        "S14",
        _storm(
            "restart_manager",
            "kill_group",
            config={**ANY_SIZE, "min_replicas": 2},
            groups=2,
            group_world_size=1,
            step_s=0.05,
            heal_s=1.5,
            heal_timeout_s=5.0,
            from_checkpoint=1.0,
            checkpoint_every=5,
            fault_every_s=2.5,
            restart_s=0.3,
            init_sync=False,
        ),
        lighthouse.NO_OTHER_IS_AHEAD,
    ),
)
