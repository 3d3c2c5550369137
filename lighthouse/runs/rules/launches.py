"""Which processes belong to which launch of a run.

A completed run is launched anew by the first process that knows nothing of it: a supervisor that was never here, nor a
rank of it; or a rank of attempt 0 that was told no number, of no supervisor that was here. Every process of the launch
before is told that its launch was completed.
"""

from lighthouse.runs.rules.ranks import Ranks
from lighthouse.runs.rules.record import Former
from lighthouse.runs.rules.supervisors import Supervisors
from lighthouse_protocol.messages.run import RankHello


class Launches:
    def __init__(self, former: Former | None = None) -> None:
        self.former = former

    def begin(self, completed: int, ranks: Ranks, supervisors: Supervisors) -> None:
        """The present launch becomes the former one; generation `completed` was its last."""
        self.former = Former(completed, _incarnations(ranks, supervisors))

    def completed_before(self, entry: RankHello) -> int | None:
        """The generation that completed this process's launch, if that was the former one."""
        former = self.former
        if former is None:
            return None
        told = [number for number in (entry.seen, entry.generation) if number is not None]
        is_of = entry.rank.supervisor in former.incarnations or any(number <= former.number for number in told)
        return former.number if is_of else None

    def completed_for(self, supervisor: str) -> int | None:
        """The same for a supervisor, by its incarnation."""
        former = self.former
        return former.number if former is not None and supervisor in former.incarnations else None

    @staticmethod
    def knows(supervisor: str, ranks: Ranks, supervisors: Supervisors) -> bool:
        """Whether it, or a rank of it, was in the present launch."""
        return supervisor in _incarnations(ranks, supervisors)

    def is_first(self, entry: RankHello, ranks: Ranks, supervisors: Supervisors) -> bool:
        """Whether this process knows nothing of the present launch."""
        return entry.is_first and not (self.knows(entry.rank.supervisor, ranks, supervisors) or ranks.knows(entry.rank))


def _incarnations(ranks: Ranks, supervisors: Supervisors) -> tuple[str, ...]:
    """Of the supervisors that were here, and of those whose ranks were."""
    return tuple(dict.fromkeys((*supervisors.incarnations, *(rank.rank.supervisor for rank in ranks))))
