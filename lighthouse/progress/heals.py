"""The heals of a job's replica groups, from the views that their managers send: how far they are, and their lines in
the log."""

import logging

from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.status import HealStatus
from lighthouse_protocol.rules.heal import GroupHeal
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer

log = logging.getLogger(__name__)


class JobHeals:
    """Nothing is kept of a group that reports no heal."""

    def __init__(self, job: str, timers: Timers) -> None:
        self._job = job
        self._clock = timers.time
        self._heals: dict[str, GroupHeal] = {}
        self._timer = DeadlineTimer(self._look, timers)

    def take(self, view: GroupView) -> None:
        is_reported = any(rank.sample.heal is not None for rank in view.ranks)
        heal = self._heals.get(view.replica_id)
        if heal is None:
            if not is_reported:
                return
            heal = self._heals[view.replica_id] = GroupHeal()
        now = self._clock()
        heal.keep({rank.name.group_rank for rank in view.ranks}, now)
        for rank in view.ranks:
            at = now - rank.beat_age_s
            heal.take(rank.name.group_rank, rank.rank_incarnation, rank.sample.heal, at)
        self._say(view.replica_id, heal, now)
        if not is_reported and heal.next_at(now) is None:
            del self._heals[view.replica_id]
        self._set_timer(now)

    def drop(self, replica_id: str) -> None:
        """The group is lost, or has left."""
        self._heals.pop(replica_id, None)

    def status(self) -> dict[str, HealStatus]:
        """Of the groups that heal."""
        now = self._clock()
        found = {name: heal.status(now) for name, heal in self._heals.items()}
        return {name: status for name, status in found.items() if status is not None}

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._clock()
        for replica_id, heal in self._heals.items():
            self._say(replica_id, heal, now)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        due = [at for heal in self._heals.values() if (at := heal.next_at(now)) is not None]
        self._timer.set(min(due, default=None))

    def _say(self, replica_id: str, heal: GroupHeal, now: float) -> None:
        while line := heal.news(now):
            told = event("heal", job=self._job, replica_group=replica_id)
            log.info("%s: %s", replica_id, line, extra=told)
