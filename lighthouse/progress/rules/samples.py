"""How a job goes, over the last minutes: a bounded ring of samples, for the page's graphs. No I/O; handed the time.

1. A sample holds what the status says at that moment; the present numbers come by the same way, so both are equal.
2. The rate is that of the last RATE_STEPS steps, or of RATE_OVER_S where a step takes less: a step may take a
   millisecond or a minute. A job that stands still has a rate that falls with the time since.
3. A step that goes back, or a job that no group trains, begins the rate anew: a jump is no pace.
4. A sample costs O(1), beside the count of the groups, and at most KEPT of them are held.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse.members.rules.roster import Roster
from lighthouse_protocol.messages.status import RankPlace, RankState

EVERY_S = 2.0
KEPT = 300
RATE_STEPS = 4
RATE_OVER_S = 5.0


@dataclass(frozen=True, slots=True)
class Levels:
    """`training`: live groups of the quorum; `alive`: all live groups; of a job that has runs alone, its ranks. `step`:
    the highest of those that train. `goodput`: from 0 to 1; None: not known yet."""

    step: int
    training: int
    alive: int
    goodput: float | None


@dataclass(frozen=True, slots=True)
class Pace:
    """The present numbers, and the samples as columns of one length, the oldest first. `steps_per_s`: None: not known
    yet. `discards`: steps, summed over replica groups."""

    step: int
    training: int
    alive: int
    goodput: float | None
    steps_per_s: float | None
    discards: int
    ages_s: list[float]
    steps_per_s_then: list[float | None]
    training_then: list[int]
    alive_then: list[int]
    goodput_then: list[float | None]


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    levels: Levels
    steps_per_s: float | None


class Samples:
    """Of one job. Moments are of one clock that never goes back."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)
        self._rated: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def take(self, levels: Levels, now: float) -> None:
        """To be called every EVERY_S."""
        self._rate_from(levels, now)
        self._samples.append(_Sample(now, levels, self.steps_per_s(levels, now)))

    def pace(self, levels: Levels, discards: int, now: float) -> Pace:
        """`levels` are those of now."""
        samples = self._samples
        return Pace(
            levels.step,
            levels.training,
            levels.alive,
            levels.goodput,
            self.steps_per_s(levels, now),
            discards,
            ages_s=[round(now - sample.at, 1) for sample in samples],
            steps_per_s_then=[sample.steps_per_s for sample in samples],
            training_then=[sample.levels.training for sample in samples],
            alive_then=[sample.levels.alive for sample in samples],
            goodput_then=[sample.levels.goodput for sample in samples],
        )

    def _rate_from(self, levels: Levels, now: float) -> None:
        rated = self._rated
        if not levels.training or (rated and levels.step < rated[-1][1]):
            rated.clear()
        if levels.training:
            rated.append((now, levels.step))
        while len(rated) > 1 and _is_enough(*rated[1], levels, now):
            rated.popleft()

    def steps_per_s(self, levels: Levels, now: float) -> float | None:
        if not levels.training:
            return 0.0
        if not self._rated or levels.step < self._rated[-1][1] or now - self._rated[0][0] < EVERY_S:
            return None
        at, step = self._rated[0]
        return round((levels.step - step) / (now - at), 3)


def _is_enough(at: float, step: int, levels: Levels, now: float) -> bool:
    return now - at >= RATE_OVER_S and levels.step - step >= RATE_STEPS


def levels_of(roster: Roster, ranks: Sequence[RankPlace], goodput: float | None) -> Levels:
    """`ranks`: of a job's runs; they count where it has no replica groups."""
    ratio = None if goodput is None else round(goodput, 4)
    if len(roster):
        training = [member for member in roster.participants() if member.is_alive]
        step = max((member.step for member in training), default=0)
        return Levels(step, len(training), sum(1 for member in roster if member.is_alive), ratio)
    alive = [rank for rank in ranks if rank.state is not RankState.LOST]
    active = [rank for rank in alive if rank.generation is not None and rank.state is not RankState.SPARE]
    return Levels(max((rank.step for rank in active), default=0), len(active), len(alive), ratio)
