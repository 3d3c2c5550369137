"""Where a job's ranks are: views come with the managers' heartbeats, runs are asked, a verdict goes to the log."""

import logging
from collections.abc import Callable

from lighthouse.members.rules.roster import Roster
from lighthouse.progress.heals import JobHeals
from lighthouse.progress.rules.job_progress import JobProgress, RanksKept, Runs
from lighthouse_protocol.messages.progress import DataUse, GroupView
from lighthouse_protocol.messages.status import HealStatus, RankPlace
from lighthouse_protocol.rules.stall import FLOOR_S, StallVerdict
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.stall_watch import StallWatch

log = logging.getLogger(__name__)


class ProgressDriver:
    """Members of the quorum are judged, groups that are observed, and active ranks of runs: the others take part in no
    collective."""

    def __init__(
        self,
        job: str,
        roster: Roster,
        timers: Timers,
        floor_s: float = FLOOR_S,
        said: Callable[[StallVerdict | None], None] = lambda verdict: None,
        runs: Callable[[], Runs] = tuple,
        kept: RanksKept | None = None,
        check_lag: Callable[[], None] = lambda: None,
    ) -> None:
        """`said` is called with each new verdict, and with None when something moves again. `runs` says where the
        ranks of the job's runs are now. `check_lag` calls `was_late` if the process itself was held up."""
        self._roster = roster
        self._runs = runs
        self._progress = JobProgress(floor_s, kept)
        self._heals = JobHeals(job, timers)
        self._clock = timers.time
        self._check_lag = check_lag
        self._watch = StallWatch(timers, log, job, self._verdict, self._left_s, floor_s, said)

    def take(self, replica_id: str, view: GroupView) -> None:
        """`replica_id` is that of the session."""
        if view.replica_id == replica_id:
            self._progress.take(view, self._clock())
            self._heals.take(view)
            self._watch.wake()

    def run_moved(self) -> None:
        """A rank of a run is there."""
        self._watch.wake()

    def was_late(self, by_s: float) -> None:
        """The whole process was held up; to be told before anything is judged."""
        self._progress.was_late(by_s, self._clock())

    def look(self) -> None:
        """For a verdict, now; else that is done when there may be one."""
        self._watch.look()

    def verdict(self) -> StallVerdict | None:
        """As it is now, and as the log has it."""
        return self._verdict(self._clock())

    def ranks(self) -> tuple[RankPlace, ...]:
        """The worst first."""
        self._forget()
        return self._progress.places(self._members, self._alive, self._clock(), self._runs())

    @property
    def heals(self) -> dict[str, HealStatus]:
        """By replica group; of those that heal."""
        self._forget()
        return self._heals.status()

    @property
    def data(self) -> DataUse | None:
        """What is used of the data, by the ranks of all groups; None: none reports it."""
        self._forget()
        return self._progress.data

    @property
    def observed(self) -> list[str]:
        """The replica groups whose ranks have no Agents."""
        return self._progress.observed

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return self._progress.seconds

    def close(self) -> None:
        self._watch.close()
        self._heals.close()
        for name in self._progress.names:
            self._drop(name)

    @property
    def _members(self) -> list[str]:
        return [member.replica_id for member in self._roster.participants()]

    @property
    def _alive(self) -> set[str]:
        return {member.replica_id for member in self._roster if member.is_alive}

    def _forget(self) -> None:
        for name in self._progress.names:
            if self._roster.get(name) is None:
                self._drop(name)

    def _drop(self, replica_id: str) -> None:
        self._progress.drop(replica_id)
        self._heals.drop(replica_id)

    def _verdict(self, now: float) -> StallVerdict | None:
        self._check_lag()
        return self._progress.verdict(self._members, now, self._runs())

    def _left_s(self, now: float) -> float | None:
        self._forget()
        return self._progress.left_s(self._members, now, self._runs())
