"""The plan of `lighthouse chaos` follows from its seed, and its verdict from what the job has reported."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.cli.chaos_plan import (
    SECONDS,
    Outcome,
    PlannedFault,
    Target,
    Watcher,
    has_others,
    parse_kinds,
    plan,
    ranks_of,
)
from lighthouse_protocol.messages.chaos import IN_RANK, ON_LINK, FaultKind, FaultOrder
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.progress import DataUse, StateDigest
from lighthouse_protocol.messages.status import JobStatus, MemberState
from lighthouse_protocol.refusals import InvalidRequest
from tests.lighthouse.statuses import job, member, place

KINDS = st.lists(st.sampled_from(FaultKind), min_size=1, unique=True)
RANKS = st.lists(st.builds(Target, st.sampled_from("abc"), st.integers(0, 3)), min_size=1, unique=True)
SEEDS = st.integers(0, 1 << 32)


class TestPlan:
    @given(SEEDS, KINDS, RANKS, st.randoms())
    def test_the_same_seed_gives_the_same_plan_in_any_order(self, seed, kinds, ranks, draw) -> None:
        faults = plan(seed, kinds, 5.0, 100.0, ranks)
        draw.shuffle(kinds)
        draw.shuffle(ranks)
        assert plan(seed, kinds, 5.0, 100.0, ranks) == faults

    @given(SEEDS, KINDS, RANKS)
    def test_every_fault_is_one_that_a_manager_accepts(self, seed, kinds, ranks) -> None:
        groups = {rank.replica_id for rank in ranks}
        for number, fault in enumerate(plan(seed, kinds, 5.0, 100.0, ranks)):
            target = fault.target
            FaultOrder(number, fault.kind, target.group_rank, fault.seconds, fault.delay_s).check_limits()
            assert fault.kind in kinds
            assert target in ranks or (target.group_rank is None and target.replica_id in groups)
            assert (fault.delay_s > 0) == (fault.kind is FaultKind.SLOW)

    @given(SEEDS, RANKS, st.floats(0.5, 50.0))
    def test_the_faults_are_in_order_and_within_the_time(self, seed, ranks, duration_s) -> None:
        moments = [fault.at_s for fault in plan(seed, list(FaultKind), 1.0, duration_s, ranks)]
        assert moments == sorted(moments)
        assert all(0 < at_s < duration_s for at_s in moments)

    def test_the_mean_time_between_faults(self) -> None:
        assert 900 < len(plan(1, [FaultKind.STOP], 10.0, 10_000.0, [Target("a", 0)])) < 1100

    def test_all_kinds_and_ranks_are_drawn(self) -> None:
        ranks = [Target(group, rank) for group in "ab" for rank in range(2)]
        faults = plan(1, list(FaultKind), 1.0, 500.0, ranks)
        assert {fault.kind for fault in faults} == set(FaultKind) == set(SECONDS)
        killed = {fault.target for fault in faults if fault.kind is FaultKind.KILL}
        assert killed == {*ranks, Target("a"), Target("b")}
        assert {f.target for f in faults if f.kind in ON_LINK} == {Target("a"), Target("b")}
        assert {f.target for f in faults if f.kind in IN_RANK} == set(ranks)

    def test_another_seed_gives_another_plan(self) -> None:
        ranks = [Target("a", 0)]
        assert plan(1, list(FaultKind), 1.0, 50.0, ranks) != plan(2, list(FaultKind), 1.0, 50.0, ranks)

    def test_without_ranks_there_are_no_faults(self) -> None:
        assert plan(1, list(FaultKind), 1.0, 50.0, []) == ()


class TestKinds:
    def test_a_list(self) -> None:
        assert parse_kinds("stop, kill,stop") == (FaultKind.STOP, FaultKind.KILL)

    @pytest.mark.parametrize(
        ("text", "words"),
        [("clock", "clock cannot be injected: the daemons"), ("kil", "'kil' is not one of kill, stop"), ("", "'' is")],
    )
    def test_a_kind_that_is_none(self, text: str, words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            parse_kinds(text)


def training(*, step: int = 10, compared: int = -1, digests: str = "xx", **more: object) -> JobStatus:
    """Groups a and b of one rank each, which train."""
    members = tuple(member(name, world_size=1) for name in "ab")
    ranks = tuple(
        place(name, 0, step=step, compared=StateDigest(compared, 7, digest) if compared >= 0 else None)
        for name, digest in zip("ab", digests, strict=True)
    )
    return job(*members, ranks=ranks, **more)  # pyright: ignore[reportArgumentType]


def incident(id: str, kind: IncidentKind = IncidentKind.CHAOS, step_s: float | None = None) -> IncidentSummary:
    return IncidentSummary(id, "j", kind, "what happened", ("b",), 0.0, 0.0, step_s=step_s)


KILL = PlannedFault(1.0, FaultKind.KILL, Target("b", 0))
OVER = (incident("i", step_s=0.5),)
"""The incident of the fault, after which the job has committed."""


def watcher(first: JobStatus | None = None) -> Watcher:
    """At the end of a baseline of 10 steps in 10 s, during which b/0 was then killed."""
    watched = Watcher(first or training(step=0), 0.0)
    watched.update(training(step=10))
    watched.mark(10.0)
    watched.outcomes.append(Outcome(KILL, 10, incident="i"))
    return watched


def over(compared: int = 20, **more: Any) -> Watcher:
    """The job has trained on after the fault."""
    watched = watcher()
    watched.update(training(step=29, compared=compared, incidents=OVER, **more))
    return watched


def verdict(watched: Watcher, at: float = 30.0, *, verifies: bool = True, is_complete: bool = True):
    watched.mark(at)
    return watched.document(verifies=verifies, is_complete=is_complete)


class TestVerdict:
    def test_a_clean_run(self) -> None:
        watched = over(discards=3)
        assert watched.is_settled(verifies=True)
        found = verdict(watched)
        assert (found["faults"], found["survived"], found["verified"], found["problems"]) == (1, 1, 1, [])
        assert (found["baseline_steps_per_s"], found["steps_per_s"], found["goodput"]) == (1.0, 0.95, 0.95)
        assert (found["discards"], found["states_compared"]) == (3, 2)
        assert found["kinds"] == {"kill": found["all"]}
        assert (found["all"]["next_commit_median_s"], found["all"]["next_commit_p99_s"]) == (0.5, 0.5)

    def test_the_99th_percentile_is_not_the_median(self) -> None:
        watched = watcher()
        watched.outcomes = [Outcome(KILL, 10, incident=str(n)) for n in range(200)]
        costs = tuple(incident(str(n), step_s=float(n)) for n in range(200))
        watched.update(training(step=29, compared=20, incidents=costs))
        assert verdict(watched)["all"]["next_commit_p99_s"] == 197.0

    def test_states_compared_before_the_fault_verify_nothing(self) -> None:
        watched = over(compared=10)
        assert (watched.is_settled(verifies=False), watched.is_settled(verifies=True)) == (True, False)
        found = verdict(watched)
        assert found["verified"] == 0
        assert found["problems"] == ["not verified, as not all groups have compared later states: kill b/0"]

    @pytest.mark.parametrize("options", [{"verifies": False}, {"is_complete": False}])
    def test_states_need_not_be_compared_after_ctrl_c_or_without_verify(self, options) -> None:
        assert verdict(over(compared=10), **options)["problems"] == []

    def test_the_target_of_a_fault_is_at_risk_until_it_is_back(self) -> None:
        watched = watcher()
        assert watched.at_risk == {"b"}
        watched.outcomes.append(Outcome(replace(KILL, kind=FaultKind.NAN, target=Target("a", 0)), 10))
        assert watched.at_risk == {"b"}, "a NaN loses no group"
        watched.outcomes.append(Outcome(KILL, 10, refused="it restarts"))
        watched.update(training(step=29, incidents=OVER))
        assert watched.at_risk == set()

    def test_a_group_that_is_not_back_has_not_survived(self) -> None:
        watched = watcher()
        away = training(step=29, compared=20, incidents=OVER)
        watched.update(replace(away, members=away.members[:1]))
        assert not watched.is_settled(verifies=False)
        assert verdict(watched)["problems"] == ["not survived: kill b/0"]

    def test_a_fault_that_is_cut_short_is_no_problem(self) -> None:
        assert verdict(watcher(), verifies=False, is_complete=False)["problems"] == []

    def test_digests_that_differ(self) -> None:
        assert verdict(over(digests="xy"))["problems"] == ["rank 0, step 20: the states of a, b differ"]

    def test_digests_of_other_steps_may_differ(self) -> None:
        watched = watcher()
        for step, digests in ((20, "xx"), (24, "yy")):
            watched.update(training(step=29, compared=step, digests=digests, incidents=OVER))
        assert verdict(watched)["problems"] == []

    @pytest.mark.parametrize("kind", [IncidentKind.DIVERGENCE, IncidentKind.NOT_APPLIED])
    def test_an_incident_of_a_wrong_state(self, kind: IncidentKind) -> None:
        watched = watcher()
        for incidents in ((incident("d", kind), *OVER), OVER):
            watched.update(training(step=29, compared=20, incidents=incidents))
        assert verdict(watched)["problems"] == [f"incident d: {kind}: what happened"]

    def test_an_older_incident_is_no_problem(self) -> None:
        old = incident("d", IncidentKind.DIVERGENCE)
        watched = watcher(training(step=0, incidents=(old,)))
        watched.update(training(step=29, compared=20, incidents=(old, *OVER)))
        assert verdict(watched)["problems"] == []

    def test_samples_that_were_not_used_once(self) -> None:
        data = DataUse(100, 20, 1, is_exact=False)
        assert verdict(over(data=data))["problems"] == [f"samples: {data}"]

    def test_verifying_needs_states(self) -> None:
        assert "no rank has compared its state" in str(verdict(over(compared=-1))["problems"])
        assert verdict(over(compared=-1), verifies=False)["problems"] == []

    def test_a_lighthouse_that_restarts_counts_from_0(self) -> None:
        """And it knows no rank until the groups have connected."""
        watched = watcher(training(step=0, discards=7))
        watched.update(training(step=20, discards=9))
        watched.update(replace(training(step=0), ranks=()))
        assert watched.step == 20
        watched.update(training(step=29, compared=20, incidents=OVER, discards=1))
        watched.update(replace(training(step=0), ranks=()))
        found = verdict(watched)
        assert (found["discards"], found["steps_per_s"]) == (10, 0.95)

    def test_a_refused_fault_does_not_count(self) -> None:
        watched = watcher()
        watched.outcomes[0].refused = "it restarts"
        watched.update(training(step=29, compared=20))
        found = verdict(watched)
        assert (found["faults"], found["refused"], found["problems"]) == (0, ["kill b/0: it restarts"], [])


def test_targets_are_the_ranks_of_groups_that_train() -> None:
    idle = member("c", MemberState.IDLE, is_participant=False)
    seen = replace(training(), members=(*training().members, idle))
    assert ranks_of(seen) == (Target("a", 0), Target("b", 0))


def test_the_last_group_with_the_state_is_spared() -> None:
    assert has_others(training(), "a")
    assert has_others(training(), "a", {"a"})
    assert not has_others(training(), "a", {"b"})
    a, b = training().members
    healing = replace(training(), members=(a, replace(b, state=MemberState.HEALING)))
    assert not has_others(healing, "a")
    assert has_others(healing, "b")
