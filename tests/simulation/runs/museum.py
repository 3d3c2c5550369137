"""Planted defects: methods of the machines replaced by wrong ones, and the checker that finds each."""

# pyright: reportPrivateUsage=false

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from agent_client.restart.rules import events
from agent_client.restart.rules.machine import RankMachine
from lighthouse.job import events as lighthouse_events
from lighthouse.job import generations
from lighthouse.job.events import GenerationSent
from lighthouse.job.generations import Generations, Ranks, RestartLog
from lighthouse.job.records import GenerationState, KeySpaces
from lighthouse.job.restarts import RunMachine, Supervisors
from lighthouse_protocol.messages.run import GenerationEnded, RankHello, RankId, RunCounters, RunStopped
from tests.simulation import world
from tests.simulation.runs.plan import RunPlan, draw_plan
from tests.simulation.runs.rank import RankProcess
from tests.simulation.runs.simulation import run_plan
from tests.simulation.runs.supervisor import Supervisor
from tests.simulation.world import Result

_assign = generations.assign


@dataclass(frozen=True, slots=True)
class Exhibit:
    """`replaced`: (owner, name, by). `plan` and `terms`: what is fixed of the plan that a seed draws. `shown_by` are
    seeds among which are some that show it."""

    name: str
    defect: str
    rule: str
    replaced: tuple[tuple[Any, str, Any], ...]
    scenario: str = "storm"
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shown_by: range = range(20)

    @contextmanager
    def planted(self) -> Generator[None]:
        with ExitStack() as stack:
            for owner, name, by in self.replaced:
                stack.enter_context(mock.patch.object(owner, name, by))
            yield

    def draw(self, seed: int) -> RunPlan:
        drawn = draw_plan(seed, self.scenario)
        return replace(drawn, **{**self.plan, "terms": replace(drawn.terms, **self.terms)})

    def run(self, seed: int) -> Result:
        return run_plan(self.draw(seed))

    def is_found(self, seed: int) -> bool:
        return self.run(seed).violation.startswith(f"{self.rule} ")


# -- the lighthouse


def _forgets(**fields: Any) -> Any:
    whole = RunMachine.record
    return lambda self, now: replace(whole(self, now), **fields)


def _send_by_slot(self: Generations, rank: Any) -> None:
    assert self.current.generation is not None
    self._emit(GenerationSent(rank.rank, self.current.generation))


def _end_without_an_incident(self: Generations, slots: Sequence[int], reason: str, now: float) -> None:
    self._break(reason, now, is_fault=False)


def _stop_ranks_only(self: RunMachine, reason: str, who: str) -> None:
    if not self._is_over:
        self.stop = RunStopped(reason, who, self.generations.current.number)
        self.generations.current.is_broken = True
        self.generations.end()
        self._emit(lighthouse_events.Stopped(self.stop, self.generations.everyone, is_new=True))


def _half(ranks: Any, current: Any, terms: Any) -> bool:
    slots = current.slots if current.survivors else range(terms.target)
    return sum(slot in ranks.ready for slot in slots) >= max(1, len(slots) // 2)


def _count_every_death(self: RestartLog, lost: tuple[RankId, ...], cause: str) -> bool:
    self.counters = generations.count_incident(self.counters)
    return True


def _by_slot(members: Any, previous: Sequence[int], terms: Any, *running: Any) -> tuple[RankId, ...]:
    return _assign(members, (), terms, *running)


def _unfenced(self: KeySpaces, generation: int) -> dict[Any, bytes]:
    return self._spaces.setdefault(generation, {})


def _break_for_anybody(self: GenerationState, rank: RankId) -> bool:
    self.survivors -= {rank}
    self.running.discard(rank)
    return True


def _launch_for_anybody(self: RunMachine, entry: RankHello, session: int | None, now: float) -> None:
    if self.completed is not None:
        self._begin_launch()
    if not self._send_end(entry.rank):
        self.generations.enter(entry, session, now)


# -- ranks and supervisors


def _run_locally(by: int) -> Any:
    """Without a lighthouse, the number after its own."""
    wait = RankMachine._wait

    def wrong(self: RankMachine) -> list[Any]:
        effects = wait(self)
        if (self._stream.is_open and self._stream.since is None) or self.generation is None or self.outcome is not None:
            return effects
        counters = replace(_COUNTERS, number=self.generation + by)
        return [*effects, events.Run(counters, 0, 1)]

    return wrong


_COUNTERS = RunCounters()
_heard_by_rank = RankProcess._heard
_heard_by_supervisor = Supervisor._heard


def _deaf_to(kind: type[Any], hear: Any) -> Any:
    return lambda self, message: None if isinstance(message, kind) else hear(self, message)


CROWDED = {"fault_every_s": 0.5, "restart_s": 0.05, "boot_s": 0.05, "interrupt_s": 0.01}
FREE = {
    "min_active": 1,
    "divisible_by": 1,
    "hosts_together": False,
    "max_iterations": None,
    "max_restarts": None,
    "restart_delay_s": None,
}
PAIR = {"hosts": 1, "ranks_per_host": 2}
OF_TWO = {**FREE, "world_size": 2, "active": None}
WITH_SPARES = {**FREE, "active": 1}

EXHIBITS = (
    Exhibit(
        "told-and-not-written",
        "a generation is told, and the journal does not have its list",
        "G1",
        ((RunMachine, "record", _forgets(generation=None)),),
    ),
    Exhibit(
        "behind-is-no-incident",
        "ranks that are behind end a generation, and no incident is counted",
        "G7",
        ((Generations, "fail_behind", _end_without_an_incident),),
        plan={"mix": ("behind_rank", "raise_in_rank")},
    ),
    Exhibit(
        "number-given-twice",
        "numbers do not rise for ever",
        "G1",
        ((generations, "next_number", lambda current, stride, **_: current + (current < 3)),),
    ),
    Exhibit(
        "number-run-twice",
        "a rank that does not reach the lighthouse begins its last generation again",
        "G2",
        ((RankMachine, "_wait", _run_locally(0)),),
        plan={**CROWDED, "mix": ("raise_in_rank", "cut_host", "kill_lighthouse")},
    ),
    Exhibit(
        "number-invented",
        "a rank that does not reach the lighthouse counts by itself (the documents' fallback)",
        "G3",
        ((RankMachine, "_wait", _run_locally(1)),),
        plan={**CROWDED, "mix": ("raise_in_rank", "cut_host", "kill_lighthouse")},
    ),
    Exhibit(
        "place-of-a-finished-predecessor",
        "who comes is told a generation in which its slot is that of its predecessor, which has finished",
        "G3",
        ((Generations, "_send_generation", _send_by_slot),),
        scenario="ends",
        plan={**CROWDED, "mix": ("pause_rank", *3 * ("kill_rank",), "launch_again"), "steps": 3},
        shown_by=range(9, 60),
    ),
    Exhibit(
        "spare-told-nothing",
        "who comes while a generation stands is not told so, and waits for a number that has passed",
        "G4",
        ((Generations, "_send_generation", lambda self, rank: None),),
        terms=WITH_SPARES,
    ),
    Exhibit(
        "heartbeat-puts-off-a-deadline",
        "a heartbeat that comes after a deadline and before its timer, which is late, puts off what was due",
        "G4",
        ((Generations, "is_due", lambda self, now: False), (world, "MAX_TIMER_LATENESS_S", 1.0)),
        plan={
            "mix": ("hang_rank", "raise_in_rank"),
            "hard_timeout_s": 90.0,
            "hosts": 1,
            "ranks_per_host": 3,
            "steps": 1000,
        },
        terms={**FREE, "world_size": 3, "active": None, "join_timeout_s": 0.5},
        shown_by=range(20, 40),
    ),
    Exhibit(
        "runs-on",
        "a rank does not stop when its generation is over",
        "G4",
        ((RankProcess, "_heard", _deaf_to(GenerationEnded, _heard_by_rank)),),
    ),
    Exhibit(
        "stop-forgotten",
        "a stop does not outlive the lighthouse",
        "G5",
        ((RunMachine, "record", _forgets(stop=None)),),
        scenario="stops",
        plan={"mix": ("stop_run", "kill_lighthouse")},
    ),
    Exhibit(
        "stop-echoed",
        "who was told a stop and comes again when it has been lifted stops the run once more",
        "G5",
        (
            (RunMachine, "_stop", _stop_ranks_only),
            (RunMachine, "_note_stop", lambda self, supervisors: None),
        ),
        scenario="stops",
        plan={"mix": ("stop_run", "resume", "break_supervisor", "pause_supervisor"), "fault_every_s": 0.3},
    ),
    Exhibit(
        "stop-not-obeyed",
        "a supervisor that is told the stop goes on",
        "G5",
        (
            (Supervisor, "_heard", _deaf_to(RunStopped, _heard_by_supervisor)),
            (RankProcess, "_heard", _deaf_to(RunStopped, _heard_by_rank)),
        ),
        scenario="stops",
        plan={"mix": ("stop_run",)},
    ),
    Exhibit(
        "completion-forgotten",
        "a completion does not outlive the lighthouse",
        "G6",
        ((RunMachine, "record", _forgets(completed=None)),),
        scenario="ends",
        plan={"mix": ("kill_lighthouse", "launch_again")},
    ),
    Exhibit(
        "completed-and-begun-again",
        "any rank that comes after the completion begins a new launch, also one of the old",
        "G6",
        ((RunMachine, "_enter", _launch_for_anybody),),
        scenario="ends",
        plan={**PAIR, **CROWDED, "mix": ("cut_one_way", "launch_again"), "steps": 3},
        terms=OF_TWO,
        shown_by=range(60),
    ),
    Exhibit(
        "every-death-counts",
        "each rank that dies in one incident is an incident of its own",
        "G7",
        ((RestartLog, "worsen", _count_every_death),),
    ),
    Exhibit(
        "restart-keeps-its-hundred",
        "a process that was started again begins at the next number, not at the next multiple of the stride",
        "G7",
        ((generations, "next_number", lambda current, stride, **_: current + 1),),
    ),
    Exhibit(
        "ranks-by-slot",
        "ranks are dealt anew by slot in each generation",
        "G8",
        ((generations, "assign", _by_slot),),
        terms=FREE,
    ),
    Exhibit(
        "keys-not-fenced",
        "who is in an older generation reads and writes its keys",
        "G9",
        ((KeySpaces, "_fenced", _unfenced),),
        plan={"mix": ("cut_one_way", "cut_host", "raise_in_rank", "hang_rank"), "fault_every_s": 0.5},
        shown_by=range(60),
    ),
    Exhibit(
        "half-is-enough",
        "half of the ranks go on without the others, who live (the documents' max(1, n//2))",
        "G10",
        ((generations, "_is_majority", _half),),
        plan={
            "mix": ("hang_rank", "hang_rank", "raise_in_rank"),
            "hosts": 2,
            "ranks_per_host": 1,
            "hard_timeout_s": 90.0,
        },
        terms={**OF_TWO, "join_timeout_s": 1.0},
    ),
    Exhibit(
        "nobody-is-waited-for",
        "the first who are ready go on",
        "G10",
        ((generations, "_is_incomplete", lambda ranks, current, terms: False),),
        terms=FREE,
    ),
    Exhibit(
        "the-dying-go-on",
        "what is about to be restarted with a lost rank makes a generation without it",
        "G10",
        ((generations, "_is_torn", lambda ranks, current: False),),
        plan={"mix": ("kill_rank", "kill_rank"), "is_group_scope": True},
        terms=FREE,
    ),
    Exhibit(
        "incidents-kept-for-ever",
        "the record grows with each incident",
        "G11",
        ((generations, "RESTARTS_KEPT", 10**9),),
        plan={**PAIR, **CROWDED, "mix": ("raise_in_rank",), "fault_every_s": 0.2, "step_s": 0.1, "steps": 100},
        terms=OF_TWO,
    ),
    Exhibit(
        "names-are-anybodys",
        "a second supervisor takes the name of one that is there",
        "G13",
        ((Supervisors, "_keeps", lambda self, known, entry, now: False),),
        plan={"mix": ("impostor_supervisor", "kill_rank")},
    ),
    Exhibit(
        "slots-are-anybodys",
        "a process takes the slot of a rank that is there, as its next attempt or by its incarnation",
        "G13",
        ((RunMachine, "impostor", lambda self, entry, now: None),),
        plan={"mix": ("impostor_rank", "kill_rank")},
    ),
    Exhibit(
        "keys-are-anybodys",
        "a process that is no rank of the run sets its keys",
        "G13",
        ((Ranks, "is_of_slot", lambda self, slot, secret: True),),
        plan={"mix": ("impostor_rank", "kill_rank")},
    ),
    Exhibit(
        "spare-breaks-it",
        "the death of a spare ends the generation of the others",
        "G12",
        ((GenerationState, "lose", _break_for_anybody),),
        terms=WITH_SPARES,
    ),
)
