"""What is done about training that stands still, once its evidence is there. No I/O.

- notify: nothing, but that it is known.
- restart-suspects: the replica groups of the ranks that are behind are killed, and their supervisors restart them; what
  a Wrapper runs is interrupted, and runs again in its processes. If no rank is behind (the network, a divergence)
  nothing is killed, and never all of several members. A group that is alone has none to wait for: it is restarted,
  unless all of its ranks are equally behind.
- stop-run: the job's run is stopped; without a run, its groups are killed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.rules.rank_text import list_names

LEFT_TO_PEOPLE = "nothing is killed; `lighthouse kill` restarts a group, `lighthouse stop` ends the run"


class OnStall(StrEnum):
    NOTIFY = "notify"
    RESTART_SUSPECTS = "restart-suspects"
    STOP_RUN = "stop-run"


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranks for which their replica groups are to be restarted, or that all is to `stop`; `text` says which, and
    why."""

    text: str
    restart: tuple[RankName, ...] = ()
    stop: bool = False

    @property
    def is_final(self) -> bool:
        """Something is done: nothing more in this incident."""
        return self.stop or bool(self.restart)

    @property
    def groups(self) -> dict[str, frozenset[int]]:
        """Those that are to be restarted, and for which of their ranks."""
        names = sorted({rank.replica_id for rank in self.restart})
        return {name: frozenset(rank.group_rank for rank in self.restart if rank.replica_id == name) for name in names}


def decide(policy: OnStall, behind: Iterable[RankName], members: Mapping[str, int]) -> Decision:
    """`members`: the replica groups that train together, and how many ranks each has."""
    match policy:
        case OnStall.NOTIFY:
            return Decision("notified: nothing is killed (--on-stall notify)")
        case OnStall.STOP_RUN:
            return Decision("stop", stop=True)
        case OnStall.RESTART_SUSPECTS:
            return _restart(tuple(sorted(name for name in set(behind) if name.replica_id in members)), members)


def _restart(ranks: tuple[RankName, ...], members: Mapping[str, int]) -> Decision:
    behind = sorted({name.replica_id for name in ranks})
    groups = ", ".join(behind)
    if not behind:
        return Decision(f"no rank is behind: {LEFT_TO_PEOPLE}")
    if len(members) == 1:
        if len(ranks) >= members[groups]:
            return Decision(f"all ranks of {groups} are equally behind: {LEFT_TO_PEOPLE}")
        return Decision(f"{groups}, the only group: {list_names(ranks)} behind", ranks)
    if len(behind) == len(members):
        return Decision(f"all groups have ranks that are behind ({groups}): {LEFT_TO_PEOPLE}")
    return Decision(f"{groups}, whose ranks are behind", ranks)
