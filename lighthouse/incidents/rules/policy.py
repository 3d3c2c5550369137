"""What is done about training that stands still, once its evidence is there. No I/O.

- notify: nothing, but that it is known.
- restart-suspects: the replica groups of the ranks that are behind are killed, and their supervisors restart them. If
  no rank is behind (the network, a divergence) nothing is killed, and never all of several members. If the quorum is
  one group it is restarted, unless all of its ranks are equally behind.
- stop-run: the job's run is stopped; without a run, its groups are killed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.progress import RankName


class OnStall(StrEnum):
    NOTIFY = "notify"
    RESTART_SUSPECTS = "restart-suspects"
    STOP_RUN = "stop-run"


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


def decide(policy: OnStall, behind: Iterable[RankName], members: Mapping[str, int]) -> Decision:
    """`members`: the replica groups of the quorum, and how many ranks each has."""
    match policy:
        case OnStall.NOTIFY:
            return Decision("notified: nothing is killed (--on-stall notify)")
        case OnStall.STOP_RUN:
            return Decision("stop", stop=True)
        case OnStall.RESTART_SUSPECTS:
            return _restart({name for name in behind if name.replica_id in members}, members)


def _restart(ranks: set[RankName], members: Mapping[str, int]) -> Decision:
    behind = sorted({name.replica_id for name in ranks})
    if not behind:
        return Decision("no rank is behind: nothing is killed")
    if len(members) == 1:
        return _restart_only(behind[0], ranks, members[behind[0]])
    if len(behind) >= len(members):
        return Decision(f"all groups have ranks that are behind ({', '.join(behind)}): nothing is killed")
    return Decision(f"killed {', '.join(behind)}, whose ranks are behind", kill=tuple(behind))


def _restart_only(group: str, ranks: set[RankName], size: int) -> Decision:
    """No other group waits for it, and without a restart it stands still for good."""
    if len(ranks) >= size:
        return Decision(f"all ranks of {group} are equally behind: nothing is killed")
    numbers = ", ".join(str(name.group_rank) for name in sorted(ranks, key=lambda name: name.group_rank))
    return Decision(f"killed {group}, the only group, whose ranks {numbers} are behind", kill=(group,))
