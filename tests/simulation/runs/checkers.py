"""The promises of a run, checked from outside the machines. docs/contributing/simulation.md lists them.

A lost journal begins a new era: its records bind nothing any more, but the numbers that live ranks know still do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lighthouse.job import events
from lighthouse.job.records import RunRecord
from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.messages.run import Generation, GenerationFormed, HelloRejected, RankHello, RankId, RunStopped
from lighthouse_protocol.refusals import DuplicateReplica, LighthouseError, NotPermitted, WrongState
from tests.simulation.runs.counters import Recount
from tests.simulation.runs.lighthouse import KeyRequest
from tests.simulation.world import MAX_RATE, violated

if TYPE_CHECKING:
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation

MAX_RESTARTS = 16
MAX_LOST = 64
OBEYED_WITHIN_S = 2.0
REFUSALS = (DuplicateReplica, NotPermitted)


class Checkers:
    def __init__(self, simulation: "RunSimulation") -> None:
        self._simulation = simulation
        self.named: dict[int, Generation] = {}
        self.newest: Generation | None = None
        self.formed_at = 0.0
        self.stop: RunStopped | None = None
        self.stopped_at = 0.0
        self.completed_at: float | None = None
        self.over_at: dict[int, float] = {}
        self._ran: dict[RankId, int] = {}
        self._named_once: set[RankId] = set()
        self._processes: dict[RankId, RankProcess] = {}
        self.heard_of: dict[str, float] = {}
        self._unwritten: set[str] = set()  # nothing was written down since these were heard of
        self._ever: set[int] = set()
        self.ended_by = ""
        self.ended_at = 0.0
        self._keys: dict[tuple[int, str, str], bytes] = {}
        self._lifted: list[str] = []
        self._durable: RunRecord | None = None
        self.recount = Recount(simulation.plan.terms)

    def is_standing(self, number: int) -> bool:
        return self.newest is not None and self.newest.number == number and number not in self.over_at

    # -- what happens

    def started(self, rank: "RankProcess") -> None:
        self._processes[rank.rank] = rank
        if self.stop is not None and rank.supervisor.born_at > self.stopped_at:
            violated("G5", f"{rank.rank} is started by a supervisor that came after the stop")

    def journal_lost(self) -> None:
        self.named, self.newest, self.stop, self.completed_at = {}, None, None, None
        self.over_at, self._named_once, self._keys, self.heard_of, self._unwritten = {}, set(), {}, {}, set()
        self._lifted, self._durable = [], None
        self.recount = Recount(self._simulation.plan.terms)

    def lighthouse_started(self, machine: RunMachine) -> None:
        for incarnation in self._unwritten:
            del self.heard_of[incarnation]
        self._unwritten.clear()
        if machine.stop != self.stop:
            violated("G5", f"a lighthouse starts with stop {machine.stop}; {self.stop} was in force")
        newest, former = self.newest, machine.former.number if machine.former is not None else None
        if self.completed_at is not None and newest is not None:
            if newest.number not in (machine.completed, former):
                violated("G6", f"a lighthouse has forgotten that {newest.number} was completed")
        elif machine.generations.current.generation != newest:
            violated("G1", f"a lighthouse starts with {machine.generations.current.generation} after {newest}")
        if self.newest is not None:
            self.over_at.pop(self.newest.number, None)
            if machine.generations.current.is_broken or self.completed_at is not None:
                self.over_at[self.newest.number] = self._simulation.world.now
        self.recount.restarted(machine)

    def entered(self, entry: RankHello) -> None:
        self.supervisor_entered(self._processes[entry.rank].supervisor.incarnation)

    def supervisor_entered(self, incarnation: str) -> None:
        if incarnation not in self.heard_of:
            self.heard_of[incarnation] = self._simulation.world.now
            self._unwritten.add(incarnation)

    # -- the machine, after an event and at each of its effects

    def handled(self, machine: RunMachine, event: events.RunEvent | None) -> None:
        self.recount.handled(machine, event, stood=self.newest is not None and self.is_standing(self.newest.number))
        if self.stop is not None and not machine.stop and not isinstance(event, events.ResumeAsked):
            violated("G5", "a stop was lifted by nobody")

    def effect(self, machine: RunMachine, effect: events.RunEffect) -> None:
        match effect:
            case events.GenerationFormed(generation, spares):
                self._formed(machine, generation, spares)
            case events.GenerationSent(rank, generation):
                self._named(generation, f"handed to {rank}")
            case events.Interrupted(number, reason, _, is_new=True):
                self._interrupted(number, reason)
            case events.Stopped(stop, _, is_new=True):
                if any(lifted in stop.reason for lifted in self._lifted):  # so a rank says why it has ended
                    violated("G5", f"the echo of a stop that was lifted stops the run again: {stop}")
                self.stop, self.stopped_at = stop, self._simulation.world.now
                self._ends("stopped")
                self._simulation.world.counts["stops"] += 1
            case events.Resumed():
                self._lifted += [] if self.stop is None else [str(self.stop)]
                self.stop, self.ended_by = None, ""
            case events.Completed(number, _, is_new=True):
                self._completed(number)
            case _:
                pass

    def written(self, record: RunRecord) -> None:
        """Check a record that is durable from now on."""
        self._durable = record
        self._unwritten.clear()
        most_lost = max((len(restart.lost) for restart in record.restarts), default=0)
        if len(record.restarts) > MAX_RESTARTS or most_lost > MAX_LOST:
            violated("G11", f"a record has {len(record.restarts)} restarts, one with {most_lost} lost")
        if len(record.failed_at) > (self._simulation.plan.terms.max_restarts or 0) + 1:
            violated("G11", f"a record has {len(record.failed_at)} failures")
        if len(record.ranks) > self._simulation.plan.terms.world_size:
            violated("G11", f"a record has {len(record.ranks)} ranks")

    def settled(self, machine: RunMachine, due: float | None, now: float) -> None:
        if due is not None and due <= now:
            violated("G4", f"deadline {due} is not after {now}")
        if self.stop is not None and machine.stop != self.stop:
            violated("G5", f"{machine.stop} in place of {self.stop}")

    # -- G1, G6, G7, G8, G10: a generation forms

    def _formed(self, machine: RunMachine, generation: Generation, spares: Sequence[RankId]) -> None:
        simulation, number, before = self._simulation, generation.number, self.newest
        simulation.world.counts["generations"] += 1
        if self._durable is None or self._durable.generation != generation:
            violated("G1", f"generation {number} is told and not written down")
        if number in self.named or (before is not None and number <= before.number):
            violated("G1", f"{number} is given out after {before.number if before else 'a lost journal'}")
        if self.stop is not None:
            violated("G5", f"generation {number} forms after {self.stop}")
        if self.completed_at is None:
            self._by_majority(machine, generation, spares)
            self._keeps_places(before, generation)
            self._without_the_dying(machine, before, generation)
        else:
            self._after_completion(generation, self.completed_at)
        attempts = {rank: self._processes[rank].attempt for rank in generation.active}
        fresh = {rank for rank in attempts if rank not in self._named_once and rank not in self._ran}
        for wrong in self.recount.formed(generation.counters, attempts, fresh):
            violated("G7", wrong)
        self.recount.begin(generation)
        self._named_once |= set(generation.active)
        self._ever.add(number)
        if before is not None:
            self.over_at.setdefault(before.number, simulation.world.now)
        self.named[number] = self.newest = generation
        self.formed_at, self.ended_by = simulation.world.now, ""
        self._keys = {key: value for key, value in self._keys.items() if key[0] == number}
        terms = simulation.plan.terms
        size = len(generation.active)
        if not terms.min_active <= size <= terms.target or size % terms.divisible_by:
            violated("G8", f"{size} ranks are active under {terms}")

    def _named(self, generation: Generation, what: str) -> None:
        if self.named.get(generation.number) != generation:
            violated("G1", f"{generation} is {what}; the number names {self.named.get(generation.number)}")

    def _after_completion(self, generation: Generation, completed_at: float) -> None:
        """Check that a generation after a completion is a new launch with supervisors that were unknown before."""
        for rank in generation.active:
            supervisor = self._processes[rank].supervisor
            if self.heard_of.get(supervisor.incarnation, completed_at) < completed_at:
                violated("G6", f"{rank} was of the run that was completed, and is in {generation.number}")
        self.completed_at = None
        self._simulation.work.launch_again()
        self._simulation.world.counts["launched again"] += 1

    def _by_majority(self, machine: RunMachine, generation: Generation, spares: Sequence[RankId]) -> None:
        if self.newest is None:
            return
        ready = {rank.slot for rank in (*generation.active, *spares)}
        before = self.newest.active
        ranks = machine.generations.ranks
        left_out = [rank for rank in before if rank.slot not in ready and ranks.find_live(rank) is not None]
        if left_out and sum(rank.slot in ready for rank in before) < len(before) // 2 + 1:
            violated("G10", f"{left_out} live, and are left out by less than a majority of {len(before)}")

    def _without_the_dying(self, machine: RunMachine, before: Generation | None, generation: Generation) -> None:
        """Check that a generation has no rank that will restart with a lost one."""
        over_at = None if before is None else self.over_at.get(before.number)
        wait_s = self._simulation.plan.terms.join_timeout_s / MAX_RATE
        if before is None or over_at is None or self._simulation.world.now >= over_at + wait_s:
            return
        ranks, finished = machine.generations.ranks, self.recount.finished
        gone = {rank.unit for rank in before.active if ranks.find_live(rank) is None and rank not in finished}
        if torn := [rank for rank in generation.active if rank.unit in gone]:
            violated("G10", f"{torn} will be restarted with others that are lost, and run {generation.number}")

    def _keeps_places(self, before: Generation | None, generation: Generation) -> None:
        if before is None:
            return
        places = {rank.slot: place for place, rank in enumerate(generation.active)}
        for place, rank in enumerate(before.active[: len(generation.active)]):
            if rank.slot in places and places[rank.slot] != place:
                violated("G8", f"slot {rank.slot} was rank {place} and is {places[rank.slot]}")

    # -- G12, and the end

    def _interrupted(self, number: int, reason: str) -> None:
        if self.is_standing(number) and not self.recount.has_cause():
            violated("G12", f"{number} is broken for nothing: {reason}")
        if self.is_standing(number):
            self.recount.broken_by_a_return()
        self.over_at.setdefault(number, self._simulation.world.now)

    def _completed(self, number: int) -> None:
        if self.stop is not None or self.newest is None or number != self.newest.number:
            violated("G6", f"{number} is completed after {self.newest}, stop {self.stop}")
        simulation = self._simulation
        if simulation.work.step < simulation.plan.steps:
            violated("G6", f"{number} is completed at step {simulation.work.step}")
        simulation.world.counts["completions"] += 1
        self.completed_at = simulation.world.now
        self._ends("completed")
        self.over_at[number] = simulation.world.now
        self.recount.completed()

    def _ends(self, how: str) -> None:
        self.ended_by, self.ended_at = how, self._simulation.world.now

    # -- G13: strangers

    def refused_stranger(self, what: Any, heard: Sequence[Any], is_still_there: bool) -> None:
        """Check that a stranger gets a refusal, and that its victim keeps its place."""
        is_refused = any(isinstance(m, HelloRejected) and isinstance(m.error, REFUSALS) for m in heard)
        if not is_refused or not is_still_there:
            violated("G13", f"{what} of a stranger is answered {heard}; its place is kept: {is_still_there}")
        self._simulation.world.counts["strangers refused"] += 1

    # -- G2, G3: ranks

    def heard(self, rank: RankId, told: GenerationFormed) -> None:
        """Check a generation that a rank receives."""
        number = told.counters.number
        generation = self.named.get(number)
        if generation is not None and (generation.counters, _slots(generation)) != (told.counters, told.slots):
            violated("G1", f"{rank} is told {told}; {number} names {generation}")

    def runs(self, rank: RankId, number: int, place: int, world_size: int) -> None:
        generation = self.named.get(number)
        if generation is None:
            if number not in self._ever:
                violated("G3", f"{rank} runs {number}, which has not formed")
        elif rank not in generation.active:
            violated("G3", f"{rank} runs {number}, which names {generation.active}")
        elif (place, world_size) != (generation.active.index(rank), len(generation.active)):
            violated("G3", f"{rank} runs {number} as {place} of {world_size}; it names {generation.active}")
        if number <= self._ran.get(rank, -1):
            violated("G2", f"{rank} runs {number} after {self._ran[rank]}")
        self._ran[rank] = number
        if self.stop is not None and self._simulation.world.now > self.stopped_at + OBEYED_WITHIN_S:
            self._late_for_stop(rank)

    def _late_for_stop(self, rank: RankId) -> None:
        if self._simulation.is_untroubled(self._processes[rank], OBEYED_WITHIN_S):
            violated("G5", f"{rank} runs {OBEYED_WITHIN_S:g} s after {self.stop}")

    def stepped(self, number: int) -> None:
        """Check a collective that all ranks of a generation have completed."""
        if self.completed_at is not None and number in self.over_at:
            violated("G6", f"a step of {number} after its completion")

    # -- G9: keys

    def key_answered(
        self, request: KeyRequest, value: bytes | None, error: LighthouseError | None, present: int
    ) -> None:
        key = (request.generation, str(request.kind), request.name)
        if request.value is not None and isinstance(error, NotPermitted):
            # Its stream has ended before its call has come: then it is no rank of the run for the lighthouse.
            self._simulation.world.counts["keys of ranks that had gone"] += 1
        elif request.generation != present:
            if not isinstance(error, WrongState):
                violated("G9", f"{request} is answered {value!r} {error!r} in generation {present}")
            self._simulation.world.counts["fenced keys"] += 1
        elif request.value is not None:
            if error is not None:
                violated("G9", f"{request} is refused: {error!r}")
            self._keys[key] = request.value
        elif value != self._keys.get(key):
            violated("G9", f"{request} is answered {value!r}; {self._keys.get(key)!r} was written")


def _slots(generation: Generation) -> tuple[int, ...]:
    return tuple(rank.slot for rank in generation.active)
