"""When an incident begins and ends, what belongs to it, and that the policy acts on evidence only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from lighthouse.job import incidents
from lighthouse.job.events import MemberLost
from lighthouse.job.incidents import (
    MAX_FOLLOWED,
    MAX_LOOKS,
    MAX_SUSPECTS,
    SLOW_AGAIN_S,
    UNCONFIRMED_S,
    ActionDue,
    Changed,
    Decision,
    EvidenceWanted,
    IncidentArchive,
    IncidentMachine,
    OnStall,
    Opened,
    Recovered,
    decide,
)
from lighthouse.job.records import Group
from lighthouse.job.slow_ranks import SlowRank
from lighthouse_protocol.messages.incident import (
    Gathered,
    Incident,
    IncidentKind,
    IncidentSummary,
    MemberEvidence,
    RankEvidence,
)
from lighthouse_protocol.messages.membership import Distrust, DistrustKind
from lighthouse_protocol.messages.progress import RankName, RejectedStep
from lighthouse_protocol.rules.stall import Kind, StallVerdict

MEMBERS = {"a": 2, "b": 2, "c": 2}
UNIX_S = 1_763_806_501.0


def behind(*names: str, still_s: float = 61.0, text: str = "") -> StallVerdict:
    ranks = tuple(RankName(name.partition("/")[0], int(name.partition("/")[2])) for name in names)
    kind = Kind.BEHIND if names else Kind.NETWORK
    return StallVerdict(kind, ranks, text or f"{', '.join(names) or 'nobody'} behind", still_s)


def names(group: str, *ranks: int) -> tuple[RankName, ...]:
    return tuple(RankName(group, rank) for rank in ranks)


def gathered(*names: str) -> Gathered:
    ranks = [(name.partition("/")[0], int(name.partition("/")[2])) for name in names]
    return Gathered(tuple(MemberEvidence(group, RankEvidence(rank)) for group, rank in ranks))


def only(kind: type[Opened | Changed | Recovered], effects: Sequence[incidents.Effect] | None) -> Incident:
    """The incident of the only effect, which is of this kind."""
    [effect] = effects or ()
    assert isinstance(effect, kind)
    return effect.incident


def action_of(effects: Sequence[incidents.Effect]) -> Decision:
    """What is due by the second of two effects, after the evidence."""
    _, due = effects
    assert isinstance(due, ActionDue)
    return due.decision


@dataclass
class Stage:
    policy: OnStall = OnStall.NOTIFY
    now: float = 1000.0
    all: list[incidents.Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = IncidentMachine("j", self.policy, IncidentArchive().make_id)
        self.group = Group("b", "i1", self.now)

    def told(self, effects: list[incidents.Effect]) -> list[incidents.Effect]:
        self.all += effects
        return effects

    def stalled(self, verdict: StallVerdict, step: int = 10) -> list[incidents.Effect]:
        return self.told(self.machine.open_or_update_stall(verdict, step, self.now, UNIX_S))

    def opens(self, verdict: StallVerdict) -> str:
        """The incident that the stall becomes."""
        opened, wanted = self.stalled(verdict)
        assert isinstance(opened, Opened)
        assert isinstance(wanted, EvidenceWanted)
        return wanted.id

    def lost(self, *names: str, seen_at: float | None = None, quorum_id: int = 7, is_asked: bool = False):
        losses = [MemberLost(name, quorum_id, "its connection was lost", seen_at) for name in names]
        return self.told(
            [e for loss in losses for e in self.machine.add_loss(loss, self.now, UNIX_S, is_asked=is_asked)]
        )

    def took(self, id: str, *names: str) -> list[incidents.Effect]:
        return self.told(self.machine.add_evidence(id, gathered(*names), MEMBERS, self.now))

    def formed(self, quorum_id: int = 8, step: int = 10, *, is_new: bool = True, **seen: int) -> list[incidents.Effect]:
        return self.told(self.machine.record_new_quorum(quorum_id, step, self.now, is_new=is_new, members=seen))

    def exited(self, name: str, reason: str = "SIGKILL", *, is_member: bool = True) -> list[incidents.Effect] | None:
        evidence = RankEvidence(1, process="ended: SIGKILL", output=("last line",))
        effects = self.machine.add_exit_report(name, reason, evidence, self.now, UNIX_S, is_member=is_member)
        return None if effects is None else self.told(effects)

    def back(self, *names: str, quorum_id: int = 9) -> list[incidents.Effect]:
        return self.formed(quorum_id, 12, **dict.fromkeys(names, 0))

    def reached(self, step: int, quorum_id: int = 8) -> list[incidents.Effect]:
        return self.told(self.machine.record_step_reached(step, quorum_id, self.now))

    @property
    def last(self) -> IncidentSummary:
        return next(e.incident.summary for e in reversed(self.all) if isinstance(e, Opened | Changed | Recovered))

    @property
    def opened(self) -> list[IncidentSummary]:
        return [effect.incident.summary for effect in self.all if isinstance(effect, Opened)]


@pytest.fixture
def stage() -> Stage:
    return Stage()


class TestTheEndOfTheJob:
    """The next run with its name, perhaps days later, has nothing to do with its incidents."""

    def test_the_last_step_is_the_recovery(self, stage: Stage):
        stage.lost("b", is_asked=True)
        stage.formed(step=10)
        stage.now += 5
        assert only(Recovered, stage.machine.end_job(12, 8, stage.now)).summary.step_s == 5

    def test_without_a_step_there_is_no_recovery(self, stage: Stage):
        stage.lost("b", is_asked=True)
        stage.formed(step=10)
        assert stage.machine.end_job(10, 8, stage.now) == []
        assert not stage.machine.is_awaiting_commit
        stage.now += 86_400
        assert (stage.back("b"), stage.reached(13, 9)) == ([], [])

    def test_a_loss_that_ended_it_is_no_incident_of_the_next(self, stage: Stage):
        stage.lost("b")
        stage.machine.end_job(10, 7, stage.now)
        assert stage.formed() == []

    def test_evidence_on_its_way_is_kept(self, stage: Stage):
        id = stage.opens(behind("b/1"))
        stage.machine.end_job(11, 7, stage.now)
        assert only(Changed, stage.took(id, "b/1")[:1]).evidence


class TestAStall:
    def test_its_offsets_are_counted_from_the_last_move(self, stage: Stage):
        [opened, wanted] = stage.stalled(behind("b/1", still_s=61.0))
        assert isinstance(opened, Opened)
        summary = opened.incident.summary
        assert summary == IncidentSummary(
            "20251122-101501", "j", IncidentKind.STALL, "b/1 behind", ("b/1",), UNIX_S, noticed_s=61.0
        )
        assert wanted == EvidenceWanted(summary.id, ("b/1",))
        stage.now += 2
        effects = stage.took(summary.id, "a/0", "b/1")
        assert [one.name for one in only(Changed, effects[:1]).evidence] == ["b/1", "a/0"], "the suspects first"
        stage.told(stage.machine.record_action(summary.id, action_of(effects).text, stage.now))
        stage.now += 30
        stage.told(stage.machine.end_stall(stage.now))
        stage.now += 5
        assert stage.reached(10) == [], "that step had begun before"
        told = only(Recovered, stage.reached(11, quorum_id=7)).summary
        assert (told.evidence_s, told.acted_s, told.over_s, told.step_s) == (63.0, 63.0, 93.0, 98.0)
        assert (told.quorum_s, told.action) == (None, "notified: nothing is killed (--on-stall notify)")
        assert not stage.machine.is_awaiting_commit

    def test_it_is_one_until_something_moves(self, stage: Stage):
        stage.stalled(behind("b/1"))
        assert stage.stalled(behind("b/1", still_s=99)) == []
        stage.machine.end_stall(stage.now)
        stage.stalled(behind("b/1"))
        assert len(stage.opened) == 2
        assert len({summary.id for summary in stage.opened}) == 2

    def test_another_verdict_is_looked_at_anew_and_not_for_ever(self, stage: Stage):
        incident_id = stage.opens(behind())
        assert not [e for e in stage.stalled(behind("b/0")) if isinstance(e, EvidenceWanted)], "one look at a time"
        stage.took(incident_id)
        for number in range(1, 8):
            stage.stalled(behind(f"b/{number}"))
            stage.took(incident_id)
        assert sum(isinstance(effect, EvidenceWanted) for effect in stage.all) == MAX_LOOKS
        assert (len(stage.opened), stage.last.suspects) == (1, ("b/7",))

    def test_who_was_behind_stays_its_suspect_when_the_others_only_wait(self, stage: Stage):
        """The join timeout has left b out: nobody of the quorum is behind, and all wait for a new one."""
        incident_id = stage.opens(behind("b/1"))
        stage.took(incident_id)
        stage.now += 60
        assert stage.stalled(behind()) == []
        assert (stage.last.suspects, stage.last.text) == (("b/1",), "b/1 behind")
        stage.stalled(behind("a/0"))
        assert stage.last.suspects == ("a/0",)

    def test_its_first_evidence_is_when_there_was_some_and_the_same_answer_is_said_once(self, stage: Stage):
        incident_id = stage.opens(behind("b/1", still_s=5.0))
        stage.now += 0.1
        stage.told(stage.machine.record_action(incident_id, action_of(stage.took(incident_id)).text, stage.now))
        stage.now += 56
        stage.stalled(behind("b/0"))
        assert not [effect for effect in stage.took(incident_id) if isinstance(effect, ActionDue)]
        assert (stage.last.evidence_s, stage.last.acted_s) == (pytest.approx(5.1), pytest.approx(5.1))

    def test_that_ends_before_its_evidence_is_there_has_nothing_done(self):
        stage = Stage(OnStall.RESTART_SUSPECTS)
        incident_id = stage.opens(behind("b/1"))
        stage.machine.end_stall(stage.now)
        assert not [e for e in stage.took(incident_id, "b/1") if isinstance(e, ActionDue)]
        assert stage.last.action == "progress resumed: nothing was done"

    def test_that_recovers_before_its_evidence_is_there_gets_it_still(self, stage: Stage):
        incident_id = stage.opens(behind("b/1"))
        stage.machine.end_stall(stage.now)
        stage.reached(11)
        assert stage.took(incident_id, "b/1") != []
        assert not stage.machine.is_awaiting_commit


NOTHING = "nothing is killed; `lighthouse kill` restarts a group, `lighthouse stop` ends the run"


class TestThePolicy:
    @pytest.mark.parametrize(
        ("policy", "suspects", "decision"),
        [
            (OnStall.NOTIFY, "b/1", Decision("notified: nothing is killed (--on-stall notify)")),
            (OnStall.STOP_RUN, "b/1", Decision("stop", stop=True)),
            (OnStall.RESTART_SUSPECTS, "b/0 b/1", Decision("b, whose ranks are behind", names("b", 0, 1))),
            (OnStall.RESTART_SUSPECTS, "", Decision(f"no rank is behind: {NOTHING}")),
            (OnStall.RESTART_SUSPECTS, "gone/1", Decision(f"no rank is behind: {NOTHING}")),
            (
                OnStall.RESTART_SUSPECTS,
                "a/1 b/1 c/0",
                Decision(f"all groups have ranks that are behind (a, b, c): {NOTHING}"),
            ),
        ],
    )
    def test_is_due_when_the_evidence_is_there(self, policy: OnStall, suspects: str, decision: Decision):
        stage = Stage(policy)
        incident_id = stage.opens(behind(*suspects.split()))
        assert not [effect for effect in stage.all if isinstance(effect, ActionDue)], "evidence comes first"
        assert action_of(stage.took(incident_id)) == decision

    @pytest.mark.parametrize(
        ("ranks", "groups", "text"),
        [
            ([3], {"a": {3}}, "a, the only group: a/3 behind"),
            (range(1, 8), {"a": set(range(1, 8))}, "a, the only group: a/1-7 behind"),
            (range(8), {}, f"all ranks of a are equally behind: {NOTHING}"),
        ],
    )
    def test_restarts_the_only_group_unless_all_of_it_is_behind(
        self, ranks: Sequence[int], groups: dict[str, set[int]], text: str
    ):
        decision = decide(OnStall.RESTART_SUSPECTS, names("a", *ranks), {"a": 8})
        assert (decision.groups, decision.text) == (groups, text)

    def test_is_due_though_many_incidents_have_begun_since(self):
        """As with `lighthouse chaos`, whose faults also strike a job that has stalled."""
        stage = Stage(OnStall.RESTART_SUSPECTS)
        incident_id = stage.opens(behind("b/1"))
        for number in range(MAX_FOLLOWED + 1):
            stage.told([stage.machine.open_fault("c", "slow c", f"c{number}", 10, stage.now, UNIX_S)])
        assert action_of(stage.took(incident_id)).groups == {"b": frozenset({1})}

    def test_after_a_kill_nothing_more_is_killed_in_that_incident(self):
        stage = Stage(OnStall.RESTART_SUSPECTS)
        incident_id = stage.opens(behind("b/1"))
        stage.took(incident_id)
        assert stage.stalled(behind("c/1")) == []
        assert stage.last.suspects == ("b/1",), "what it was for stands"

    def test_who_is_killed_is_lost_within_the_stall_and_its_return_ends_it(self):
        stage = Stage(OnStall.RESTART_SUSPECTS)
        incident_id = stage.opens(behind("b/1", "c/0", still_s=60.0))
        stage.took(incident_id)
        assert stage.lost("b", is_asked=True) == []
        stage.machine.end_stall(stage.now)
        assert stage.lost("c", is_asked=True) == [], "though something moves since the first"
        stage.now += 3
        stage.formed(8, step=10)
        stage.now += 1
        stage.reached(11)
        assert (stage.last.quorum_s, stage.last.quorum_id, stage.last.step_s) == (63.0, 8, 64.0)
        stage.lost("b", quorum_id=8, is_asked=True)
        assert [summary.kind for summary in stage.opened] == [IncidentKind.STALL, IncidentKind.LOSS]


class TestALoss:
    def test_its_offsets_are_counted_from_the_last_sign_of_life(self, stage: Stage):
        assert stage.lost("b", seen_at=995.0) == []
        stage.now += 0.5
        summary = only(Opened, stage.told(stage.machine.open_losses(stage.now, {}))).summary
        assert (summary.kind, summary.noticed_s, summary.suspects) == (IncidentKind.LOSS, 5.0, ("b",))
        assert summary.text == "b: its connection was lost"
        stage.now += 0.5
        stage.formed(8, step=10)
        assert stage.reached(10) == []
        stage.now += 1
        only(Recovered, stage.reached(11))
        assert (stage.last.quorum_s, stage.last.quorum_id, stage.last.step_s) == (6.0, 8, 7.0)

    def test_several_groups_within_one_quorum_are_one(self, stage: Stage):
        stage.lost("b", is_asked=True)
        only(Changed, stage.lost("c"))
        assert stage.last.suspects == ("b", "c")
        assert stage.last.text == "b: its connection was lost; c: its connection was lost"
        assert stage.lost("b") == [], "its manager has gone, too"
        stage.formed()
        stage.lost("b", quorum_id=8, is_asked=True)
        assert len(stage.opened) == 2

    def test_of_very_many_groups_is_short(self, stage: Stage):
        stage.lost(*(f"g{number:03}" for number in range(100)), is_asked=True)
        assert stage.last.text.endswith("g015: its connection was lost and 84 more")
        assert len(stage.last.suspects) == MAX_SUSPECTS

    def test_of_all_is_the_end_of_the_job(self, stage: Stage):
        stage.lost(*MEMBERS)
        assert stage.opened == []
        stage.now += UNCONFIRMED_S + 1
        stage.formed()
        assert (stage.opened, stage.machine.is_awaiting_commit) == ([], False)

    def test_is_an_incident_however_late_a_survivor_asks(self, stage: Stage):
        """A group that is in a validation asks for the next quorum after minutes, one of LocalSGD after its steps."""
        stage.lost("b", quorum_id=7)
        stage.now += 10 * UNCONFIRMED_S
        stage.formed(a=7, b=0)
        assert [summary.suspects for summary in stage.opened] == [("b",)]

    @pytest.mark.parametrize("seen", [{"b": 7}, {"a": 0}, {"a": 6}])
    def test_is_none_if_those_who_ask_minutes_later_are_of_another_run(self, stage: Stage, seen: dict[str, int]):
        stage.lost("b", quorum_id=7)
        stage.now += UNCONFIRMED_S + 1
        assert (stage.formed(**seen), stage.opened) == ([], [])

    def test_of_all_who_come_back_is_one(self, stage: Stage):
        stage.lost(*MEMBERS)
        stage.now += 20
        stage.formed()
        assert [(s.suspects, s.noticed_s) for s in stage.opened] == [(tuple(MEMBERS), 0.0)]
        assert stage.last.quorum_s == 20.0

    def test_a_second_one_before_a_step_is_committed_keeps_the_first_open(self, stage: Stage):
        stage.lost("b", is_asked=True)
        stage.formed(8)
        stage.now += 1
        stage.lost("c", quorum_id=8, is_asked=True)
        stage.formed(9)
        stage.now += 1
        assert stage.reached(11, quorum_id=7) == []
        recovered = [only(Recovered, [effect]).summary for effect in stage.reached(11, quorum_id=9)]
        assert [(summary.quorum_id, summary.step_s) for summary in recovered] == [(8, 2.0), (9, 1.0)]

    def test_without_standing_quorums_the_next_round_tells_the_step(self, stage: Stage):
        stage.lost("b", is_asked=True)
        stage.formed(8, step=10)
        stage.formed(8, step=10, is_new=False)
        assert stage.last.step_s is None
        stage.formed(8, step=11, is_new=False)
        assert stage.last.step_s == 0.0

    def test_what_is_followed_is_bounded(self, stage: Stage):
        for number in range(3 * MAX_FOLLOWED):
            stage.lost("b", quorum_id=number, is_asked=True)
        stage.formed(99)
        stage.reached(11, quorum_id=99)
        assert sum(isinstance(effect, Recovered) for effect in stage.all) == MAX_FOLLOWED


class TestAKill:
    def test_is_an_incident_at_once_and_says_who_asked(self, stage: Stage):
        only(Opened, stage.told(stage.machine.open_kill("a", 7, "by 127.0.0.1:9: it hangs", stage.now, UNIX_S)))
        assert stage.last.text == "a: killed by 127.0.0.1:9: it hangs"
        assert (stage.last.kind, stage.last.suspects) == (IncidentKind.LOSS, ("a",))

    def test_its_loss_is_the_same_incident_with_the_same_words(self, stage: Stage):
        stage.told(stage.machine.open_kill("a", 7, "by ada", stage.now, UNIX_S))
        stage.now += 0.1
        stage.lost("a")
        stage.lost("b")
        assert len(stage.opened) == 1
        assert stage.last.text == "a: killed by ada; b: its connection was lost"


class TestAFaultOfChaos:
    @pytest.fixture
    def id(self, stage: Stage) -> str:
        stage.told([stage.machine.open_fault("b", "kill b/1", "b/1", 10, stage.now, UNIX_S)])
        [opened] = stage.opened
        assert (opened.kind, opened.text, opened.suspects) == (IncidentKind.CHAOS, "kill b/1", ("b/1",))
        return opened.id

    def end(self, stage: Stage, id: str) -> list[incidents.Effect]:
        return stage.told(stage.machine.end_fault(id))

    def test_its_cost_is_the_time_until_the_step_at_the_fault_is_committed(self, stage: Stage, id: str):
        stage.now += 1
        assert stage.reached(10) == []
        stage.now += 1
        stage.reached(11)
        assert stage.last.step_s == 2.0
        assert stage.machine.is_awaiting_commit is False
        only(Recovered, self.end(stage, id))

    def test_it_has_recovered_once(self, stage: Stage, id: str):
        stage.reached(11)
        assert not any(isinstance(effect, Recovered) for effect in stage.all), "the fault goes on"
        self.end(stage, id)
        stage.reached(12)
        self.end(stage, id)
        assert sum(isinstance(effect, Recovered) for effect in stage.all) == 1

    def test_it_recovers_after_its_end(self, stage: Stage, id: str):
        assert self.end(stage, id) == []
        stage.now += 3
        assert only(Recovered, stage.reached(11)).summary.step_s == 3.0

    def test_the_loss_of_its_target_is_its_own(self, stage: Stage, id: str):
        stage.reached(11)
        stage.lost("b", is_asked=True)
        assert stage.last.step_s is None, "a step that was granted before the loss shows no recovery"
        stage.exited("b")
        stage.now += 1
        stage.formed(8, step=11)
        stage.reached(11)
        assert stage.last.step_s is None
        stage.reached(12)
        assert (stage.last.step_s, stage.last.quorum_id) == (1.0, 8)
        self.end(stage, id)
        assert stage.last.back_s is None
        stage.now += 4
        stage.back("a", "b", "c")
        assert stage.last.back_s == 5.0
        assert [summary.kind for summary in stage.opened] == [IncidentKind.CHAOS]

    def test_the_dead_process_is_its_evidence(self, stage: Stage, id: str):
        changed = only(Changed, stage.exited("b"))
        assert (changed.id, changed.evidence[0].rank.process) == (id, "ended: SIGKILL")
        stage.told(stage.machine.open_unexplained_exits(math.inf))
        assert len(stage.opened) == 1

    def test_losses_of_others_and_later_ones_are_not_its_own(self, stage: Stage, id: str):
        stage.lost("c", is_asked=True)
        stage.reached(11)
        stage.formed(8, step=10)
        self.end(stage, id)
        stage.lost("b", is_asked=True, quorum_id=8)
        assert [summary.kind for summary in stage.opened] == [IncidentKind.CHAOS, IncidentKind.LOSS, IncidentKind.LOSS]

    def test_the_end_of_a_fault_that_is_not_followed(self, stage: Stage):
        assert self.end(stage, "20251122-101501") == []


class TestNoState:
    TORN = Distrust(DistrustKind.NOT_APPLIED, "rank 1: step 5 was committed and not applied: OSError: full")

    def test_what_a_group_says_of_its_state_is_an_incident_once(self):
        stage = Stage()
        summary = only(Opened, stage.machine.record_distrust(stage.group, self.TORN, stage.now, UNIX_S)).summary
        assert (summary.kind, summary.suspects, summary.noticed_s) == (IncidentKind.NOT_APPLIED, ("b",), 0.0)
        assert summary.text == f"b: {self.TORN.text}"
        repeated = stage.machine.record_distrust(stage.group, self.TORN, 1001.0, UNIX_S)
        assert repeated == [], "it says so until it has healed"
        stage.machine.record_new_quorum(8, 6, 1001.0, is_new=True, members={})
        assert only(Recovered, stage.machine.record_step_reached(7, 8, 1002.0)).summary.step_s == 2.0
        repeated = stage.machine.record_distrust(stage.group, self.TORN, 1003.0, UNIX_S)
        assert repeated == [], "even after the others have continued"

    def test_after_it_has_healed_the_same_is_another_one(self):
        stage = Stage()
        stage.machine.record_distrust(stage.group, self.TORN, stage.now, UNIX_S)
        assert stage.machine.record_distrust(stage.group, None, stage.now, UNIX_S) == []
        assert len(stage.machine.record_distrust(stage.group, self.TORN, stage.now, UNIX_S)) == 1


class TestNotFinite:
    REJECTED = RejectedStep(5, "the gradient of b is not finite (0.weight); samples here: 3, 9", is_own=True)

    def reject(self, stage: Stage, step: RejectedStep | None) -> list[incidents.Effect]:
        return stage.machine.record_rejected_step(stage.group, RankName("b", 1), step, stage.now, UNIX_S)

    def test_a_step_that_a_group_rejects_is_an_incident_once(self):
        stage = Stage()
        summary = only(Opened, self.reject(stage, self.REJECTED)).summary
        assert (summary.kind, summary.suspects, summary.noticed_s) == (IncidentKind.NONFINITE, ("b/1",), 0.0)
        assert summary.text == f"b/1: step 5 discarded: {self.REJECTED.reason}"
        assert self.reject(stage, self.REJECTED) == [], "it is told for a while"
        assert stage.reached(5, 7) == []
        only(Recovered, stage.reached(6, 7))

    def test_another_step_is_another_one_and_so_is_the_same_after_it_was_told_no_more(self):
        stage = Stage()
        for rejected in (self.REJECTED, replace(self.REJECTED, step=6), None, replace(self.REJECTED, step=6)):
            self.reject(stage, rejected)
        assert len(stage.machine._cases) == 3

    def test_whose_gradients_it_was_may_not_be_known(self):
        assert only(Opened, self.reject(Stage(), replace(self.REJECTED, is_own=False))).summary.suspects == ()


class TestOneFaultIsOneIncident:
    def test_the_end_of_a_process_before_its_loss_explains_it(self, stage: Stage):
        assert stage.exited("b") == []
        stage.lost("b", is_asked=True)
        [opened] = stage.opened
        assert (opened.kind, opened.text) == (IncidentKind.LOSS, "b: its connection was lost: rank 1: SIGKILL")

    def test_and_so_does_one_after_it(self, stage: Stage):
        stage.lost("b", is_asked=True)
        stage.exited("b", is_member=False)
        assert stage.last.text == "b: its connection was lost: rank 1: SIGKILL"
        [evidence] = only(Changed, stage.all[1:]).evidence
        assert (evidence.name, evidence.rank.output) == ("b/1", ("last line",))
        assert len(stage.opened) == 1

    def test_also_after_the_next_quorum_and_before_any_group_has_asked(self, stage: Stage):
        stage.lost("b")
        stage.exited("b", is_member=False)
        stage.formed(8)
        stage.exited("b", "SIGTERM", is_member=False)
        [opened] = stage.opened
        assert opened.text == "b: its connection was lost: rank 1: SIGKILL"
        assert stage.last.text == opened.text, "the first end is the cause; the others follow from it"

    def test_one_that_no_loss_follows_is_an_incident_by_itself(self, stage: Stage):
        stage.exited("b")
        assert stage.machine.open_unexplained_exits(stage.now + incidents.EXIT_KEPT_S - 0.1) == []
        summary = only(Opened, stage.machine.open_unexplained_exits(stage.now + incidents.EXIT_KEPT_S)).summary
        assert (summary.kind, summary.text) == (IncidentKind.EXIT, "b: rank 1: SIGKILL")
        assert stage.machine.open_unexplained_exits(stage.now + 1000) == []

    def test_of_many_that_no_loss_follows_it_has_the_output_of_the_first(self, stage: Stage):
        for _ in range(10 * incidents.MAX_EVIDENCE):
            stage.exited("b")
        opened = only(Opened, stage.machine.open_unexplained_exits(stage.now + incidents.EXIT_KEPT_S))
        assert len(opened.evidence) == incidents.MAX_EVIDENCE

    def test_that_of_a_group_outside_the_quorum_belongs_elsewhere(self, stage: Stage):
        assert stage.exited("x", is_member=False) is None

    def test_it_is_followed_until_the_lost_group_is_back(self, stage: Stage):
        stage.lost("b", "c", is_asked=True)
        stage.formed(8, 10)
        stage.now += 0.1
        stage.reached(11)
        assert not stage.machine.is_awaiting_commit
        stage.now += 5
        assert stage.back("a", "b") == []
        stage.now += 5
        assert only(Changed, stage.back("a", "b", "c", quorum_id=10)).summary.back_s == pytest.approx(10.1)
        assert not stage.machine.is_awaiting_quorum


class TestASlowRank:
    SLOW = SlowRank("b/1 is slow", since=940.0)
    NAME = RankName("b", 1)

    def track(self, stage: Stage, *names: RankName) -> list[incidents.Effect]:
        return stage.told(stage.machine.track_slow(dict.fromkeys(names, self.SLOW), stage.now, UNIX_S))

    def test_it_is_an_incident_with_its_own_stacks_until_it_recovers(self):
        stage = Stage(OnStall.RESTART_SUSPECTS)
        opened, wanted = self.track(stage, self.NAME)
        summary = only(Opened, [opened]).summary
        assert (summary.kind, summary.suspects, summary.noticed_s) == (IncidentKind.SLOW, ("b/1",), 60.0)
        for _ in range(MAX_LOOKS):
            assert wanted == EvidenceWanted(summary.id, ("b/1",), is_of_suspects=True)
            assert self.track(stage, self.NAME) == [], "its evidence is on the way"
            stage.now += 1
            changed = only(Changed, stage.took(summary.id, "b/1"))
            stage.now += 14
            wanted = next(iter(self.track(stage, self.NAME)), None)
        assert wanted is None, "enough"
        assert (len(changed.evidence), changed.summary.evidence_s) == (MAX_LOOKS, 61.0)
        assert stage.told(stage.machine.record_new_quorum(8, 20, stage.now, is_new=True, members={})) == []
        assert stage.told(stage.machine.record_step_reached(30, 8, stage.now)) == [], "a step is no recovery"
        over = only(Changed, self.track(stage)).summary
        assert (over.over_s, over.step_s) == (stage.now - 940.0, None)

    def test_a_rank_that_is_slow_again_and_again_is_one_incident_in_10_minutes(self):
        stage = Stage()
        self.track(stage, self.NAME)
        self.track(stage)
        stage.now += SLOW_AGAIN_S - 1
        assert self.track(stage, self.NAME) == []
        stage.now += 2
        assert isinstance(self.track(stage, self.NAME)[0], Opened)

    def test_each_rank_has_its_own(self):
        stage = Stage()
        self.track(stage, self.NAME)
        opened = [effect for effect in self.track(stage, self.NAME, RankName("c", 0)) if isinstance(effect, Opened)]
        assert [each.incident.summary.suspects for each in opened] == [("c/0",)]

    def test_ranks_that_become_slow_together_are_one_incident_with_one_collection_of_evidence(self):
        stage, names = Stage(), [RankName("b", number) for number in range(1, 9)]
        opened, wanted = self.track(stage, *names)
        summary = only(Opened, [opened]).summary
        assert (summary.text, summary.suspects) == ("b/1 is slow; also slow: b/2-8", tuple(map(str, names)))
        assert wanted == EvidenceWanted(summary.id, summary.suspects, is_of_suspects=True)
        assert self.track(stage, *names[2:]) == [], "some of its ranks are still slow"
        assert only(Changed, self.track(stage)).summary.over_s == 60.0

    def test_of_very_many_ranks_is_short(self):
        stage = Stage()
        self.track(stage, *(RankName(f"g{number:03}", 0) for number in range(100)))
        assert stage.last.text.endswith("g016/0 and 83 more")
        assert len(stage.last.suspects) == MAX_SUSPECTS

    def test_a_rank_that_recovers_before_its_evidence_is_there_gets_it_still(self):
        stage = Stage()
        self.track(stage, self.NAME)
        self.track(stage)
        changed = only(Changed, stage.took(stage.last.id, "b/1"))
        assert ([one.name for one in changed.evidence], changed.summary.over_s) == (["b/1"], 60.0)
        assert stage.took(changed.id, "b/1") == [], "it is not followed any more"

    def test_a_rank_whose_group_is_gone_is_no_longer_slow(self):
        stage = Stage()
        self.track(stage, self.NAME, RankName("c", 0))
        assert stage.machine.end_slow_group("a", stage.now) == []
        assert stage.machine.end_slow_group("c", stage.now) == []
        assert only(Changed, stage.machine.end_slow_group("b", stage.now)).summary.over_s == 60.0
        assert stage.machine.end_slow_group("b", stage.now) == []
