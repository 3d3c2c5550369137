"""The training of a generation's ranks: steps, each of them a collective of all, until the training ends."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.runs.rank import RankProcess
    from tests.simulation.runs.simulation import RunSimulation


class Work:
    """The training. Checkpoints of all ranks hold `step`; the training ends at `steps`."""

    def __init__(self, simulation: "RunSimulation") -> None:
        self._simulation = simulation
        self._plan = simulation.plan
        self.step = 0
        self._arrived: dict[int, dict[int, RankProcess]] = {}

    def begin(self, rank: "RankProcess", number: int, place: int, size: int) -> None:
        rank.after(self._step_s(), self._arrive, rank, number, place, size)

    def _step_s(self) -> float:
        return self._plan.step_s * self._simulation.world.random.uniform(0.8, 1.2)

    def _arrive(self, rank: "RankProcess", number: int, place: int, size: int) -> None:
        if rank.running != number:
            return
        known = self._arrived.get(number, {})
        arrived = {**{p: other for p, other in known.items() if other.is_up and other.running == number}, place: rank}
        self._arrived[number] = arrived
        if len(arrived) < size:
            return
        del self._arrived[number]
        self.step += 1
        self._simulation.world.counts["steps"] += 1
        self._simulation.checkers.stepped(number)
        for other_place in sorted(arrived):
            other = arrived[other_place]
            other.after(self._step_s(), self._go_on, other, number, other_place, size, self.step)

    def _go_on(self, rank: "RankProcess", number: int, place: int, size: int, step: int) -> None:
        rank.stepped(step)
        if step >= self._plan.steps:
            rank.return_from(number)
        else:
            self._arrive(rank, number, place, size)

    def launch_again(self) -> None:
        """Begin the training of a new launch."""
        self.step = 0
