"""Limits of waiting, checked repeatedly for processes that no fault has disturbed for as long."""

from typing import TYPE_CHECKING

from lighthouse.job.restarts import RunMachine
from lighthouse_protocol.messages.run import RankId
from tests.simulation.runs.checkers import OBEYED_WITHIN_S
from tests.simulation.world import MIN_RATE, violated

if TYPE_CHECKING:
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation
    from tests.simulation.runs.supervisor import Supervisor

TOLD_WITHIN_S = 3.0
MOST_DELAY_S = 30.0  # docs/how-to/in-process-restart.md: what a generation waits after failures


class Patience:
    """Limits of waiting, for processes without recent faults: G4, and that stops (G5) and completions (G6) are obeyed.

    No rank waits for a generation that has formed, or continues in one that has ended. A majority waits for the others
    no longer than the terms say.
    """

    def __init__(self, simulation: "RunSimulation") -> None:
        self._simulation = simulation
        self._checkers = simulation.checkers
        self._waits_since: dict[tuple[RankId, int], float] = {}  # for the generation after that one

    def look(self) -> None:
        simulation = self._simulation
        process = simulation.lighthouse.process
        if process is None or not process.is_up or process.is_paused:
            return
        for host in simulation.hosts:
            supervisor = host.supervisor
            if supervisor is None or not supervisor.is_up:
                continue
            if self._should_have_stopped() and simulation.is_untroubled(supervisor, OBEYED_WITHIN_S):
                violated("G5", f"{supervisor.name} is up {OBEYED_WITHIN_S:g} s after {self._checkers.stop}")
            # It waits for its ranks, and may have waited for one that was disturbed.
            was_kept = host.ranks or any(simulation.was_troubled(r, TOLD_WITHIN_S) for r in supervisor.ranks.values())
            if not was_kept and self._has_to_be_gone(supervisor, supervisor.incarnation):
                violated("G6", f"{supervisor.name} is up {TOLD_WITHIN_S:g} s after the completion")
            for rank in host.ranks:
                self._look_at(rank, process.machine)
        self._look_at_majority()

    def _look_at_majority(self) -> None:
        simulation, newest, terms = self._simulation, self._checkers.newest, self._simulation.plan.terms
        ranks = [rank for host in simulation.hosts for rank in host.ranks]
        now = simulation.world.now
        number = -1 if newest is None else newest.number
        waits = [(rank.rank, number) for rank in ranks if rank.waits]
        self._waits_since = {wait: self._waits_since.get(wait, now) for wait in waits}
        if newest is None or self._checkers.stop is not None or self._checkers.completed_at is not None:
            return
        most_delay_s = 0.0 if terms.restart_delay_s is None else MOST_DELAY_S
        patience_s = (terms.join_timeout_s + most_delay_s) / MIN_RATE + TOLD_WITHIN_S
        waiting = [
            rank
            for rank in ranks
            if rank.rank in newest.active
            and now - self._waits_since.get((rank.rank, number), now) > patience_s
            and simulation.is_untroubled(rank, patience_s)
        ]
        needed = max(len(newest.active) // 2 + 1, terms.min_active)
        if len(waiting) >= needed and terms.divisible_by == 1 and not terms.hosts_together:
            violated("G4", f"{len(waiting)} of {len(newest.active)} wait for the others for {patience_s:.1f} s")

    def _has_to_be_gone(self, process: "RankProcess | Supervisor", incarnation: str) -> bool:
        """Return whether a process of a completed run has had time to learn of the completion."""
        completed_at = self._checkers.completed_at
        if completed_at is None or self._simulation.world.now < completed_at + TOLD_WITHIN_S:
            return False
        is_old = self._checkers.heard_of.get(incarnation, completed_at) < completed_at
        return is_old and self._simulation.is_untroubled(process, TOLD_WITHIN_S)

    def _look_at(self, rank: "RankProcess", machine: RunMachine) -> None:
        simulation, newest = self._simulation, self._checkers.newest
        if self._should_have_stopped() and simulation.is_untroubled(rank, OBEYED_WITHIN_S):
            violated("G5", f"{rank.name} is up {OBEYED_WITHIN_S:g} s after {self._checkers.stop}")
        if self._has_to_be_gone(rank, rank.supervisor.incarnation):
            violated("G6", f"{rank.name} is up {TOLD_WITHIN_S:g} s after the completion")
        if self._runs_on(rank) and simulation.is_untroubled(rank, TOLD_WITHIN_S):
            violated("G4", f"{rank.name} runs {rank.running}, {TOLD_WITHIN_S:g} s after its end")
        stands = machine.generations.current.is_standing
        if newest is None or not stands or simulation.world.now < self._checkers.formed_at + TOLD_WITHIN_S:
            return
        knows = rank.told is not None and rank.told >= newest.number
        if rank.waits and not knows and simulation.is_untroubled(rank, TOLD_WITHIN_S):
            violated("G4", f"{rank.name} waits, and has not heard of {newest.number}")

    def _runs_on(self, rank: "RankProcess") -> bool:
        number, now = rank.running, self._simulation.world.now
        return number is not None and not rank.is_hung and self._checkers.over_at.get(number, now) + TOLD_WITHIN_S < now

    def _should_have_stopped(self) -> bool:
        return (
            self._checkers.stop is not None and self._simulation.world.now > self._checkers.stopped_at + OBEYED_WITHIN_S
        )
