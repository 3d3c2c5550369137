"""A run's machine against drawn terms and drawn faults: ranks, supervisors, clocks, and the lighthouse itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as hunt

from lighthouse.runs.rules import counters, formation
from lighthouse.runs.rules.config import RunConfig
from lighthouse.runs.rules.events import RankSaid, ResumeAsked, RunVerdict, StopAsked, WasLate
from lighthouse.runs.rules.generation import GenerationState
from lighthouse.runs.rules.key_space import SPACES_KEPT
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.restart_log import KEPT
from lighthouse_protocol.messages.run import FinishReport, RankId, ReadyReport, RunStopped
from tests.lighthouse.run_stage import RunStage, Worker

WORLD = 5
slots = st.integers(0, WORLD - 1)
most = st.just(set(range(WORLD))) | st.sets(slots)


@st.composite
def terms(draw: st.DrawFn) -> dict[str, Any]:
    active = draw(st.sampled_from([None, None, 2, 3, 4]))
    return {
        "active": active,
        "min_active": draw(st.integers(1, active or 3)),
        "divisible_by": draw(st.sampled_from([1, 1, 1, 2])),
        "hosts_together": draw(st.sampled_from([False, False, True])),
        "stride": draw(st.sampled_from([1, 100])),
        "join_timeout_s": draw(st.sampled_from([5.0, 60.0])),
        "return_timeout_s": draw(st.sampled_from([5.0, 60.0, 300.0])),
    }


class RunOfRanks(RuleBasedStateMachine):
    stage: RunStage
    stop: RunStopped | None = None

    @initialize(terms=terms(), start=st.booleans())
    def begin(self, terms: dict[str, Any], start: bool) -> None:
        if terms["divisible_by"] > (terms["active"] or WORLD) or terms["min_active"] > 4:
            terms["divisible_by"] = 1
        self.stage = RunStage(WORLD, obedient=False, **terms)
        self.old: dict[int, Worker] = {}
        if start:
            for slot in range(WORLD):
                self.spawn(slot, ready=True, stream=True)

    def worker(self, slot: int) -> Worker | None:
        worker = self.stage.workers.get(slot)
        return worker if worker is not None and worker.is_alive else None

    # -- ranks

    @rule(slot=slots, ready=st.booleans(), stream=st.booleans())
    def spawn(self, slot: int, ready: bool, stream: bool) -> None:
        """A new process; of its predecessor nothing was heard, if there was one."""
        if slot in self.stage.workers:
            self.old[slot] = self.stage.workers[slot]
        self.stage.spawn(slot, host=f"node{slot // 2}")
        self.stage.enter(slot, stream=stream)
        if ready:
            self.stage.ready(slot)

    @rule(slot=slots, says=st.sampled_from([ReadyReport, FinishReport]))
    def a_predecessor_is_heard_late(self, slot: int, says: type[ReadyReport] | type[FinishReport]) -> None:
        old = self.old.get(slot)
        if old is not None and old.generation is not None:
            self.stage.feed(RankSaid(old.rank, says(old.generation)))

    @rule(slot=slots)
    def say_ready(self, slot: int) -> None:
        """Interrupted, or by itself."""
        if self.worker(slot):
            self.stage.ready(slot)

    @rule(which=most)
    def recover(self, which: set[int]) -> None:
        """The lighthouse is there, supervisors have started the dead anew, and who was interrupted is ready."""
        if self.stage.is_down:
            self.stage.start_lighthouse()
        self.stage.read_ends()
        for slot in sorted(which):
            worker = self.worker(slot)
            if worker is None:
                self.spawn(slot, ready=True, stream=True)
            elif not worker.runs:
                self.stage.ready(slot)

    @rule(slot=slots)
    def fail(self, slot: int) -> None:
        worker = self.worker(slot)
        if worker is not None and worker.generation is not None:
            self.stage.fail(slot)

    @rule(which=st.sets(slots), stale=st.booleans())
    def finish(self, which: set[int], stale: bool) -> None:
        for slot in sorted(which):
            worker = self.worker(slot)
            if worker is not None and worker.generation is not None and (worker.runs or stale):
                self.stage.feed(RankSaid(worker.rank, FinishReport(worker.generation)))

    @rule(which=st.sets(slots, min_size=1, max_size=3))
    def kill(self, which: set[int]) -> None:
        self.stage.kill(*(slot for slot in sorted(which) if self.worker(slot)))

    @rule(slot=slots)
    def vanish(self, slot: int) -> None:
        if self.worker(slot):
            self.stage.vanish(slot)

    @rule()
    def read_ends(self) -> None:
        self.stage.read_ends()

    @rule(slot=slots)
    def report_dead(self, slot: int) -> None:
        if self.worker(slot):
            self.stage.report_dead(slot)

    @rule(slot=slots)
    def break_connection(self, slot: int) -> None:
        if self.worker(slot):
            self.stage.break_connection(slot)

    @rule(slot=slots, stream=st.booleans())
    def enter_again(self, slot: int, stream: bool) -> None:
        if self.worker(slot):
            self.stage.enter(slot, stream=stream)

    @rule(which=st.sets(slots))
    def beat(self, which: set[int]) -> None:
        self.stage.beat(*(slot for slot in sorted(which) if self.worker(slot)))

    # -- time, the lighthouse, the operator

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.9, 5.1, 29.9, 30.1, 61.0, 301.0]), beating=st.sets(slots))
    def wait(self, seconds: float, beating: set[int]) -> None:
        for _ in range(5):
            self.stage.wait(seconds / 5)
            self.beat(beating)

    @rule(by_s=st.sampled_from([1.0, 10.0, 40.0]))
    def be_late(self, by_s: float) -> None:
        self.stage.now += by_s
        self.stage.feed(WasLate(by_s))

    @rule(tells=st.integers(0, 6), which=most)
    def die_while_it_tells(self, tells: int, which: set[int]) -> None:
        if not self.stage.is_down:
            self.stage.tells_left = tells
            self.recover(which)
            self.stage.tells_left = None

    @rule()
    def kill_the_lighthouse(self) -> None:
        self.stage.kill_lighthouse()

    @precondition(lambda self: self.stage.is_down)
    @rule(away_s=st.sampled_from([1.0, 10.0, 25.0]), wall_s=st.sampled_from([0.0, -31.0, 31.0, 1e9]))
    def start_the_lighthouse(self, away_s: float, wall_s: float) -> None:
        """And its host's wall clock has jumped."""
        self.stage.wait(away_s)
        self.stage.config = RunConfig(wall_offset_s=wall_s)
        self.stage.start_lighthouse()

    @rule(really=st.sampled_from([False, False, True]))
    def ask_to_stop(self, really: bool) -> None:
        if really:
            self.stage.feed(StopAsked("enough", "operator"))

    @rule(which=most)
    def ask_to_resume(self, which: set[int]) -> None:
        if not self.stage.is_down:
            self.resume()
            self.recover(which)

    def resume(self) -> None:
        self.stage.feed(ResumeAsked())
        for worker in self.stage.workers.values():
            worker.stop = None
        self.stop = None

    # -- what always holds; the stage looks at every message

    @invariant()
    def a_stop_stays_until_it_is_lifted(self) -> None:
        if not hasattr(self, "stage") or self.stage.is_down:
            return
        assert self.stop is None or self.stage.machine.stop == self.stop
        told = [worker.stop for worker in self.stage.workers.values() if worker.stop is not None]
        assert all(stop == self.stage.machine.stop for stop in told)
        self.stop = self.stage.machine.stop
        assert self.stage.record.stop == self.stop

    @invariant()
    def nobody_invents_a_number(self) -> None:
        if hasattr(self, "stage"):
            for worker in self.stage.workers.values():
                assert set(worker.numbers) <= set(self.stage.named)

    @invariant()
    def no_two_have_one_place(self) -> None:
        if hasattr(self, "stage"):
            places = [(w.number, w.place) for w in self.stage.workers.values() if w.place is not None]
            assert len(set(places)) == len(places)

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        if hasattr(self, "stage"):
            machine = self.stage.machine
            assert len(list(machine.generations.ranks)) <= WORLD
            assert len(machine.generations.restarts.restarts) <= KEPT
            assert len(machine.keys.generations) <= SPACES_KEPT
            assert set(machine.generations.ranks.ready) == {
                rank.rank.slot for rank in machine.generations.ranks if rank.is_ready
            }
            assert (
                machine.generations.current.running
                <= machine.generations.current.survivors
                <= machine.generations.current.active
            )

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.settle()

    def complete(self) -> None:
        """What somebody has finished all finish: who comes back changes nothing. Then it is launched anew."""
        stage, life = self.stage, self.stage.machine.generations.current
        if life.stands and life.finished:
            stage.finish(*(rank.slot for rank in sorted(life.active) if self.is_there(rank)))
            assert stage.machine.completed is not None
        if stage.machine.completed is None:
            return
        number = stage.number
        for slot in [slot for slot, worker in stage.workers.items() if worker.numbers]:
            stage.spawn(slot)
            stage.enter(slot)
            assert stage.workers[slot].is_done
        stage.read_ends()
        stage.workers.clear()
        stage.start(*range(WORLD))
        assert stage.number > number

    def is_there(self, rank: RankId) -> bool:
        worker = self.worker(rank.slot)
        return worker is not None and worker.rank == rank

    def come(self, slot: int) -> None:
        """Who was of a completed run hears so and ends with it, also while some have launched the run anew: these wait
        until the others are launched anew, too."""
        if not self.worker(slot):
            self.stage.spawn(slot, host=f"node{slot // 2}")
        self.stage.enter(slot)
        if self.stage.workers[slot].is_done:
            del self.stage.workers[slot]
            self.come(slot)

    def settle(self) -> None:
        """The faults end: all come back, and are in one generation."""
        stage = self.stage
        stage.tells_left = None
        if stage.is_down:
            stage.start_lighthouse()
        stage.read_ends()
        self.resume()
        stage.obedient = True
        if stage.machine.completed is not None:
            self.complete()  # before somebody who was never of it launches the run anew, without those who were
        for slot in range(WORLD):
            self.come(slot)
        stage.obey()
        self.complete()
        life = stage.machine.generations.current
        left_it = [w for w in stage.workers.values() if w.is_ready and w.generation == life.number]
        assert left_it or life.is_broken or not life.is_advancing, "nobody has left it who had heard of it"
        for slot in range(WORLD):
            if life.is_advancing or not stage.workers[slot].runs:
                stage.ready(slot)
        stage.obey()
        target = stage.terms.target // stage.terms.divisible_by * stage.terms.divisible_by
        if target < stage.terms.min_active:
            return
        assert stage.machine.verdict(stage.now) is RunVerdict.STANDS
        assert stage.running() == stage.members()
        assert sorted(stage.places()) == list(range(target))
        assert {worker.number for worker in stage.workers.values()} == {stage.number}


RunOfRanks.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRunOfRanks = RunOfRanks.TestCase


def forgets(**fields: object) -> Callable[..., object]:
    """A record in which something is missing."""
    whole = RunMachine.record
    return lambda self, now: replace(whole(self, now), **fields)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (RunMachine, "record", forgets(stop=None)),
        (RunMachine, "record", forgets(generation=None)),
        (GenerationState, "has_heard", lambda self, rank, generation: True),
        (formation, "_is_incomplete", lambda ranks, life, terms: False),
        (counters, "next_number", lambda current, stride, **_: current + (current < 3)),
    ],
    ids=["a stop forgotten", "a list forgotten", "never handed again", "nobody is waited for", "a number given twice"],
)
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, place: object, name: str, wrong: object):
    many = settings(RunOfRanks.TestCase.settings, max_examples=1000, derandomize=True, database=None)
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError):
        hunt(RunOfRanks, settings=settings(many, phases=[Part.generate]))
