"""What is done about training that stands still, once its evidence is there. No I/O.

- notify: nothing, but that it is known.
- restart-behind: the replica groups of the ranks that are behind are killed; their supervisors start them again. Where
  nobody is behind (the network, a divergence) nothing is killed, and never all members of the quorum.
- stop: the job's run is stopped; without a run, its groups are killed.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from protos.progress import RankName


class OnStall(StrEnum):
    NOTIFY = "notify"
    RESTART_BEHIND = "restart-behind"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Decision:
    """Replica groups to `kill`, or that all is to `stop`; `text` says what was decided, and why."""

    text: str
    kill: tuple[str, ...] = ()
    stop: bool = False

    @property
    def is_final(self) -> bool:
        """Something is done: nothing more in this incident."""
        return self.stop or bool(self.kill)


def decide(policy: OnStall, behind: Iterable[RankName], members: Collection[str]) -> Decision:
    """`members`: the replica groups of the quorum."""
    match policy:
        case OnStall.NOTIFY:
            return Decision("notified: nothing is killed (--on-stall notify)")
        case OnStall.STOP:
            return Decision("stop", stop=True)
        case OnStall.RESTART_BEHIND:
            return _restart(sorted({name.replica_id for name in behind} & set(members)), members)


def _restart(behind: list[str], members: Collection[str]) -> Decision:
    if not behind:
        return Decision("nobody is behind: nothing is killed")
    if len(behind) >= len(set(members)):
        return Decision(f"all groups have ranks that are behind ({', '.join(behind)}): nothing is killed")
    return Decision(f"killed {', '.join(behind)}, whose ranks are behind", kill=tuple(behind))
