"""A job's incidents on the lighthouse's loop: who is asked for evidence, when the policy acts, what is told to whom."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lighthouse.job.driver import JobDriver
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.incidents import MAX_LOOKS, OnStall
from lighthouse.job.presence import JUDGED_AFTER_S
from lighthouse.job.records import QuorumConfig, RunConfig
from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse.job.store import MemoryStore
from lighthouse_protocol.messages.incident import (
    EvidenceAsked,
    Gathered,
    Incident,
    IncidentKind,
    IncidentSummary,
    SelfReport,
)
from lighthouse_protocol.messages.membership import Distrust, DistrustKind
from lighthouse_protocol.messages.progress import STEP, ComputeTotals, GroupView, PhaseTime, ProgressSample
from lighthouse_protocol.messages.run import FromRunRank, RankHeartbeat, RankHello, RankId, RunTerms
from lighthouse_protocol.messages.session import (
    Evidence,
    EvidenceDone,
    EvidenceRequest,
    GroupReport,
    Heartbeat,
    Hello,
    JoinRequest,
    KillRequest,
    Leave,
    ToManager,
)
from lighthouse_protocol.messages.status import TimelineKind
from lighthouse_protocol.refusals import LighthouseError
from tests.lighthouse.evidence import rank as evidence_of
from tests.lighthouse.peers import Caller, Listener, NoJobs
from tests.lighthouse.sessions import held, native, secret_of
from tests.lighthouse_protocol.views import after, all_reduce, rank
from tests.virtual_loop import VirtualLoop

INSIDE = all_reduce(9)


def waiting(name: str) -> GroupView:
    return GroupView(name, "i1", tuple(rank(n, inside=INSIDE, group=name, still_s=0) for n in range(2)))


def late(name: str) -> GroupView:
    """Its rank 1 has not come into the collective in which the others wait."""
    first, _ = waiting(name).ranks
    return GroupView(name, "i1", (first, rank(1, "loader", left=after(all_reduce(8)), group=name, still_s=0)))


@dataclass
class Manager:
    """The manager of one group. `answers`: when asked for evidence; `moves_when_asked`: its ranks do by then."""

    job: "Job"
    name: str
    answers: bool = True
    moves_when_asked: bool = False
    heard: list[ToManager] = field(default_factory=list)
    session: int = 0
    joins: int = 0

    def connect(self) -> None:
        hello = Hello(native(self.name), secret=secret_of(self.name))
        self.session = self.job.driver.open_session(hello, self)

    def send(self, message: ToManager) -> None:
        self.heard.append(message)
        if isinstance(message, EvidenceRequest) and self.answers:
            self.job.loop.call_later(0.5, self.give, message.number, message.group_ranks)

    def give(self, number: int, group_ranks: tuple[int, ...]) -> None:
        for group_rank in group_ranks or (0, 1):
            self.job.driver.receive_from_manager(self.session, Evidence(number, evidence_of(group_rank)))
        place = waiting(self.name) if self.moves_when_asked else None
        self.job.driver.receive_from_manager(self.session, EvidenceDone(number, place))

    def end(self, error: LighthouseError | None) -> None:
        pass

    def join(self, quorum_id: int = 0, **fields: Any) -> None:
        self.joins += 1
        participant = native(self.name, tag_quorum_id=0, seen_quorum_id=quorum_id, **fields)
        self.job.driver.receive_from_manager(self.session, JoinRequest(self.joins, participant, 600.0))

    def beat(self, granted: int, view: GroupView | None = None, **levels: Any) -> None:
        given = GroupReport(held(self.job.quorum_id, granted=granted), **levels)
        self.job.driver.receive_from_manager(self.session, Heartbeat(1, given, view))

    def told(self, kind: type[ToManager]) -> list[ToManager]:
        return [message for message in self.heard if isinstance(message, kind)]


@dataclass
class Wrapped:
    """A run of the groups' ranks. `asked`: what the incidents ask of it."""

    asked: list[Any]
    is_over: bool = False
    is_quiet: bool = False
    run_id: str = "r"
    size: int = 0
    steps: int = 0

    def ranks(self) -> tuple[()]:
        return ()

    def fail_ranks(self, *given: Any) -> bool:
        self.asked.append(given)
        return True

    def request_stop(self, *given: Any) -> None:
        self.asked.append(given)


class Job:
    """Groups a, b and c, which are in their first step under a standing quorum."""

    def __init__(self, loop: VirtualLoop, registry: IncidentRegistry, runs: Sequence[Any] = ()) -> None:
        self.loop, self.registry = loop, registry
        machine = QuorumMachine(QuorumConfig(heartbeat_timeout_s=1000.0, lease_s=1000.0, join_timeout_s=1000.0))
        self.driver = JobDriver("j", machine, Ports(loop, time.time), registry, runs=lambda: runs)
        self.managers = {name: Manager(self, name) for name in "abc"}
        for manager in self.managers.values():
            manager.connect()
        for manager in self.managers.values():
            manager.join()
        assert self.driver.status().phase == "standing"

    @property
    def quorum_id(self) -> int:
        return self.driver.status().quorum_id

    def stall(self) -> None:
        """b/1 stands still, until its limit is over."""
        for name, manager in self.managers.items():
            manager.beat(0, late(name) if name == "b" else waiting(name))
        for _ in range(63):
            self.loop.go(1)
            for manager in self.managers.values():
                manager.beat(0)

    def move(self) -> None:
        for name, manager in self.managers.items():
            manager.beat(0, waiting(name))
        self.loop.go(2)

    def go_on_without(self, *lost: str) -> None:
        """The others form the next quorum 3 s later, and commit that step after another second."""
        left = [manager for name, manager in self.managers.items() if name not in lost]
        before = self.quorum_id
        self.loop.go(3)
        for manager in left:
            manager.join(before, commit_failures=1)
        assert self.quorum_id > before
        self.loop.go(1)
        for manager in left:
            manager.beat(1)

    @property
    def incidents(self) -> tuple[IncidentSummary, ...]:
        return self.driver.status().incidents

    @property
    def newest(self) -> Incident:
        return self.registry.archive.get_incident(self.incidents[0].id)


Make = Callable[..., Job]


@pytest.fixture
def make(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> Make:
    caplog.set_level(logging.INFO)

    def make(policy: OnStall = OnStall.NOTIFY, *runs: Any) -> Job:
        return Job(loop, IncidentRegistry(policy), runs)

    return make


class TestAStall:
    def test_evidence_of_all_comes_under_one_id(self, make: Make, caplog: pytest.LogCaptureFixture):
        job = make()
        job.stall()
        [summary] = job.incidents
        assert (summary.kind, summary.suspects) == (IncidentKind.STALL, ("b/1",))
        assert summary.text.startswith("b/1 behind in loader, a/0-1, b/0, c/0-1 waiting in all_reduce")
        assert 60 <= summary.noticed_s <= 63
        assert [one.name for one in job.newest.evidence] == ["b/1", "a/0", "a/1", "b/0", "c/0", "c/1"]
        assert summary.evidence_s == summary.acted_s == pytest.approx(summary.noticed_s + 0.5)
        assert summary.action.startswith("notified")
        job.move()
        job.managers["a"].beat(1)
        [summary] = job.incidents
        assert summary.over_s is not None
        assert summary.step_s == pytest.approx(65.0)
        logged = "\n".join(caplog.messages)
        assert f"incident {summary.id}: stall: b/1 behind in loader" in logged
        assert f"incident {summary.id}: evidence of 6 ranks after 0.5 s" in logged
        assert f"incident {summary.id}: recovered: the next step was committed 65.00 s after the fault" in logged
        entries = job.driver.status(has_ranks=True).timeline
        assert [(e.replica_ids, e.text) for e in entries if e.kind is TimelineKind.INCIDENT] == [
            (("b",), f"{summary.id}: stall")
        ]

    def test_who_gives_none_in_time_is_named_and_the_policy_acts_then(self, make: Make):
        job = make(OnStall.RESTART_SUSPECTS)
        job.managers["a"].answers = False
        job.managers["c"].answers = False
        job.stall()
        killed = job.managers["b"]
        assert (killed.told(EvidenceRequest) != [], killed.told(KillRequest)) == (True, [])
        job.loop.go(9)
        assert [one.name for one in job.newest.evidence] == ["b/1", "b/0"]
        assert job.newest.missing == ("a: no full answer within 10 s", "c: no full answer within 10 s")
        [kill] = killed.told(KillRequest)
        assert kill == KillRequest(f"incident {job.newest.id}: b, whose ranks are behind", frozenset({1}))
        assert not [m for m in job.managers.values() if m is not killed and m.told(KillRequest)]

    def test_who_moves_before_the_evidence_is_there_is_not_killed(self, make: Make):
        """Its manager says so with the end of the evidence; a look for it is not due yet."""
        job = make(OnStall.RESTART_SUSPECTS)
        job.managers["b"].moves_when_asked = True
        job.stall()
        [summary] = job.incidents
        assert summary.action == "progress resumed: nothing was done"
        assert job.managers["b"].told(KillRequest) == []

    def test_a_lighthouse_that_was_held_up_reads_what_has_come_before_it_acts(self, make: Make):
        job = make(OnStall.RESTART_SUSPECTS)
        job.managers["b"].answers = False
        job.stall()
        [asked] = job.managers["b"].told(EvidenceRequest)
        assert isinstance(asked, EvidenceRequest)
        job.loop.now += 300
        job.driver.handle_pause(300)
        job.loop.go(0)
        assert job.newest.missing == ()
        job.managers["b"].moves_when_asked = True
        job.managers["b"].give(asked.number, ())
        assert job.incidents[0].action == "progress resumed: nothing was done"
        assert job.managers["b"].told(KillRequest) == []

    def test_nor_does_it_find_a_stall_by_that(self, make: Make):
        job = make(OnStall.RESTART_SUSPECTS)
        for name, manager in job.managers.items():
            manager.beat(0, late(name) if name == "b" else waiting(name))
        job.loop.now += 300
        job.driver.handle_pause(300)
        job.loop.go(1)
        assert job.incidents == ()

    def test_what_a_wrapper_runs_is_not_killed(self, make: Make):
        asked: list[Any] = []
        job = make(OnStall.RESTART_SUSPECTS, Wrapped(asked))
        job.stall()
        assert asked == [("b", {1}, f"incident {job.newest.id}: b, whose ranks are behind")]
        assert job.newest.summary.action == "interrupted b, whose ranks are behind"
        assert not [m for m in job.managers.values() if m.told(KillRequest)]

    def test_stop_stops_the_run(self, make: Make):
        asked: list[Any] = []
        job = make(OnStall.STOP_RUN, Wrapped(asked), Wrapped(asked, is_over=True), Wrapped(asked, is_quiet=True))
        job.stall()
        [summary] = job.incidents
        [(reason, who)] = asked
        assert who == f"--on-stall stop-run, incident {summary.id}"
        assert reason.startswith(f"incident {summary.id}: nothing moves: b/1 behind in loader")
        assert summary.action == "stopped the run r"
        assert not [m for m in job.managers.values() if m.told(KillRequest)]

    def test_stop_without_a_run_kills_the_groups(self, make: Make):
        job = make(OnStall.STOP_RUN)
        job.stall()
        assert job.incidents[0].action == "killed a, b, c: the job has no run to stop"
        assert all(manager.told(KillRequest) for manager in job.managers.values())

    def test_a_session_that_ends_gives_no_more(self, make: Make):
        job = make()
        for manager in job.managers.values():
            manager.answers = False
        job.stall()
        for manager in job.managers.values():
            job.driver.end_session(manager.session)
        assert job.newest.missing == tuple(f"{name}: its session has ended" for name in "abc")

    def test_who_waits_for_a_quorum_is_none(self, make: Make):
        job = make()
        job.managers["a"].join(job.quorum_id, commit_failures=1)
        for name in "abc":
            waits = tuple(rank(n, waits_for="quorum", group=name, still_s=0) for n in range(2))
            job.managers[name].beat(0, GroupView(name, "i1", waits))
        job.loop.go(70)
        assert "all ranks wait" in job.driver.status().stall
        assert job.incidents == ()

    def test_close_leaves_no_timer_and_kills_nobody(self, make: Make):
        job = make(OnStall.RESTART_SUSPECTS)
        job.managers["a"].answers = False
        job.stall()
        job.driver.close("stopping")
        assert job.incidents[0].action == "the lighthouse stopped: nothing was done"
        assert job.managers["b"].told(KillRequest) == []
        assert job.newest.missing == ("a: no full answer within 10 s",)
        for manager in job.managers.values():
            job.driver.end_session(manager.session)
        job.loop.go(0)
        assert job.loop.timers == 0


class TestASlowRank:
    def train(self, job: Job, ranks: int) -> None:
        """Train for 130 s. The ranks of b take three times as long as the others."""
        totals = dict.fromkeys("abc", ComputeTotals())
        for granted in range(130):
            job.loop.go(1)
            for name, manager in job.managers.items():
                seconds = 0.6 if name == "b" else 0.2
                totals[name] = ComputeTotals(totals[name].seconds + seconds, granted)
                places = [rank(number, group=name, still_s=0) for number in range(ranks)]
                samples = [replace(place.sample, computed=totals[name]) for place in places]
                view = [replace(place, sample=sample) for place, sample in zip(places, samples, strict=True)]
                manager.beat(granted, GroupView(name, "i1", tuple(view)))

    def test_all_of_a_slow_host_are_one_incident_and_asked_together(self, make: Make):
        job = make()
        self.train(job, ranks=2)
        [summary] = job.incidents
        assert summary.suspects == ("b/0", "b/1")
        asked = [each for each in job.managers["b"].told(EvidenceRequest) if isinstance(each, EvidenceRequest)]
        assert [each.group_ranks for each in asked] == [(0, 1)] * MAX_LOOKS
        assert [one.name for one in job.newest.evidence] == ["b/0", "b/1"] * MAX_LOOKS

    @pytest.mark.parametrize("ends", ["leaves", "is lost"])
    def test_it_ends_with_its_group_though_no_view_follows(self, make: Make, ends: str):
        job = make()
        self.train(job, ranks=1)
        assert job.newest.summary.over_s is None
        if ends == "leaves":
            job.driver.receive_from_manager(job.managers["b"].session, Leave("done"))
        else:
            job.driver.end_session(job.managers["b"].session)
            job.loop.go(2 * JUDGED_AFTER_S)
        assert job.newest.summary.over_s is not None

    def test_it_alone_is_asked_for_evidence_and_the_policy_kills_nobody(self, make: Make):
        job = make(OnStall.RESTART_SUSPECTS)
        self.train(job, ranks=1)
        slow = [place for place in job.driver.progress.ranks() if place.is_slow]
        assert [(place.replica_id, place.compute_ratio_1m) for place in slow] == [("b", pytest.approx(3, abs=0.1))]
        assert (job.newest.summary.kind, job.newest.summary.suspects) == (IncidentKind.SLOW, ("b/0",))
        assert {one.replica_id for one in job.newest.evidence} == {"b"}
        asked = [each for manager in job.managers.values() for each in manager.told(EvidenceRequest)]
        assert {each.group_ranks for each in asked} == {(0,)}
        assert not any(manager.told(KillRequest) for manager in job.managers.values())
        job.driver.end_session(job.managers["b"].session)
        for _ in range(20):
            job.loop.go(1)
            job.managers["a"].beat(130, waiting("a"))
        assert job.newest.summary.over_s is not None, "its group is lost"


class TestALoss:
    def test_from_a_broken_session_to_the_first_step(self, make: Make):
        job = make()
        job.driver.end_session(job.managers["b"].session)
        job.loop.go(2 * JUDGED_AFTER_S)
        assert job.incidents == (), "it may be the end of the job"
        job.go_on_without("b")
        [summary] = job.incidents
        assert (summary.kind, summary.suspects) == (IncidentKind.LOSS, ("b",))
        assert summary.text == "b: its connection was lost"
        assert (summary.noticed_s, summary.quorum_s, summary.step_s) == pytest.approx((0.007, 3.007, 4.014), abs=0.011)
        assert summary.quorum_id == job.quorum_id

    def test_who_leaves_in_good_order_is_none(self, make: Make):
        job = make()
        job.driver.receive_from_manager(job.managers["b"].session, Leave("drained"))
        job.go_on_without("b")
        assert job.incidents == ()


class TestAGroupWithoutAState:
    TORN = Distrust(DistrustKind.NOT_APPLIED, "rank 1: step 5 was committed and not applied")

    @pytest.mark.parametrize("seen_quorum_id", [0, 1 << 60])
    def test_its_join_is_an_incident_unless_it_is_refused(self, make: Make, seen_quorum_id: int):
        job, caller = make(), Caller()
        job.driver.request_quorum(native("z", seen_quorum_id=seen_quorum_id, distrust=self.TORN), 600.0, caller)
        kinds = [summary.kind for summary in job.incidents]
        assert kinds == ([] if seen_quorum_id else [IncidentKind.NOT_APPLIED])


class Slot(Listener):
    """A rank of a run, which answers when it is asked what it does, if it `answers`."""

    def __init__(self, job: "WrappedJob", slot: int) -> None:
        super().__init__()
        self.job, self.slot, self.answers = job, slot, True
        hello = RankHello(RankId(slot, f"i{slot}"), RunTerms(3), host="h", pid=slot + 1, is_ready=True)
        self.session = job.run.open_rank(hello, self)

    def send(self, message: object) -> None:
        super().send(message)
        if isinstance(message, EvidenceAsked) and self.answers:
            self.say(SelfReport(message.number, f"stacks of {self.slot}"))

    def say(self, message: FromRunRank) -> None:
        self.job.loop.call_later(0.1, self.job.run.receive_from_rank, self.session, message)

    def beat(self, step: int, still_s: float) -> None:
        times = (PhaseTime(STEP, 9, 9.0, 1.0),)
        self.say(RankHeartbeat(step, "running", ProgressSample(step, still_s=still_s, times=times)))


@dataclass
class RunsOf(NoJobs):
    wrapped: "WrappedJob"

    def handle_run_message(self, job: str) -> None:
        self.wrapped.driver.handle_run_message()


class WrappedJob:
    """Three ranks of run r, without Agents."""

    def __init__(self, loop: VirtualLoop, registry: IncidentRegistry) -> None:
        self.loop, self.registry = loop, registry
        machine = RunMachine(RunConfig(run="r"))
        self.run = RunDriver(("j", "r"), machine, MemoryStore(), Ports(loop, time.time), RunsOf(self))
        quorum = QuorumMachine(QuorumConfig())
        self.driver = JobDriver("j", quorum, Ports(loop, time.time), registry, runs=lambda: [self.run])
        self.slots = [Slot(self, slot) for slot in range(3)]

    def go(self, seconds: int, *steps: int, still_s: int = 0) -> None:
        """Each stands still at its step, and its process lives."""
        for second in range(seconds):
            for slot, step in zip(self.slots, steps, strict=True):
                slot.beat(step, still_s + second)
            self.loop.go(1)


class TestARun:
    def test_a_rank_that_hangs_is_an_incident_from_its_limit_to_the_next_step(self, loop: VirtualLoop):
        job = WrappedJob(loop, IncidentRegistry())
        job.slots[0].answers = False
        job.go(60, 6, 6, 5)
        assert job.driver.status().incidents == ()
        job.go(5, 6, 6, 5, still_s=60)
        [summary] = job.driver.status().incidents
        assert (summary.kind, summary.text) == (IncidentKind.STALL, "r/2 behind in step 5, r/0-1 in step 6")
        assert summary.noticed_s < 61
        evidence = job.registry.archive.get_incident(summary.id).evidence
        assert [(one.name, one.rank.pid, one.rank.stacks) for one in evidence] == [
            ("r/2", 3, "stacks of 2"),
            ("r/0", 1, ""),
            ("r/1", 2, "stacks of 1"),
        ]
        assert evidence[1].rank.missing[0].startswith("all evidence: no answer within 3 s")
        job.go(3, 7, 7, 7)
        [summary] = job.driver.status().incidents
        assert summary.step_s is not None
        assert summary.over_s is not None
        assert summary.over_s >= summary.step_s >= 65

    def test_its_job_is_there_for_as_long_as_it_has_ranks(self, loop: VirtualLoop):
        job = WrappedJob(loop, IncidentRegistry())
        assert not job.driver.is_quiet
        for slot in job.slots:
            job.run.end_rank(slot.session)
        assert job.driver.is_quiet

    def test_stacks_of_a_slot_are_given_when_asked_for(self, loop: VirtualLoop):
        job, caller = WrappedJob(loop, IncidentRegistry()), Caller[Gathered]()
        job.driver.incidents.gather_evidence({"r": (1,)}, caller)
        loop.go(1)
        [found] = caller.answers
        assert [one.name for one in found.evidence] == ["r/1"]


def test_stacks_are_given_when_asked_for(make: Make):
    job, caller = make(), Caller[Gathered]()
    job.driver.incidents.gather_evidence(None, caller)
    job.driver.incidents.gather_evidence({"b": (1,)}, caller)
    job.loop.go(1)
    every, some = caller.answers
    assert [one.name for one in every.evidence] == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    assert every.missing == ()
    assert [one.name for one in some.evidence] == ["b/1"]
    assert job.managers["b"].told(EvidenceRequest)[-1].group_ranks == (1,)  # pyright: ignore
    assert job.incidents == ()
