"""A rank of a run, as it stands beside the ranks of replica groups."""

from dataclasses import dataclass

from lighthouse_protocol.messages.progress import RankView
from lighthouse_protocol.messages.status import RankState


@dataclass(frozen=True, slots=True)
class RunRank:
    """`generation`: the last one in which it was active. `state`: None: what its view says. `is_judged`: it is active
    in a generation that goes on."""

    view: RankView
    generation: int | None = None
    state: RankState | None = None
    is_judged: bool = False
