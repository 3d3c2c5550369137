"""The loop's side of where the ranks are: their samples come by their watches, a verdict goes to the log, and what is
to be told of it with the manager's beats."""

import asyncio
import logging
from collections.abc import Callable

from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.progress import GroupView, Sample
from lighthouse_protocol.messages.session import WatchRequest
from lighthouse_protocol.rules.stall import Limits, StallVerdict
from lighthouse_runtime.timing.stall_watch import StallWatch
from manager.group.rules.progress import GroupProgress, Process

log = logging.getLogger(__name__)


class GroupProgressDriver:
    """`trains_alone`: whether the group is the only one of its quorum. `incarnation` is the group's present one."""

    def __init__(
        self, me: Participant, limits: Limits, trains_alone: Callable[[], bool], incarnation: Callable[[], str]
    ) -> None:
        self._size = me.group_world_size
        self._progress = GroupProgress(me.replica_id, limits)
        self._trains_alone = trains_alone
        self._incarnation = incarnation
        self._newest: dict[int, int] = {}  # watches, by their ranks
        self._of: dict[int, tuple[int, Process]] = {}
        timers = asyncio.get_running_loop()
        self._clock = timers.time
        self._watch = StallWatch(timers, log, "", self._verdict, self._progress.left_s, limits.floor_s)

    def opened(self, watch: int, request: WatchRequest) -> None:
        self._of[watch] = request.group_rank, Process(request.worker, request.hostname, request.pid)
        self._newest[request.group_rank] = watch

    def take(self, watch: int, sample: Sample) -> None:
        if watch not in self._of:  # its process has ended
            return
        group_rank, process = self._of[watch]
        if self._newest.get(group_rank) == watch:
            self._progress.take(group_rank, process, sample, self._clock())
            self._watch.wake()

    def ended(self, watch: int) -> None:
        """The end of an old watch says nothing of a newer one of the same rank."""
        group_rank, _ = self._of.pop(watch)
        if self._newest.get(group_rank) == watch:
            del self._newest[group_rank]
            self._progress.lose(group_rank)

    def view(self, now: float) -> GroupView:
        return self._progress.view(self._incarnation(), now)

    def close(self) -> None:
        self._watch.close()

    def _verdict(self, now: float) -> StallVerdict | None:
        newest = [rank.sample.collective for rank in self._progress.ranks(now)]
        is_among_itself = all(collective is not None and collective.within_group for collective in newest)
        is_complete = len(newest) == self._size and (is_among_itself or self._trains_alone())
        return self._progress.verdict(now, is_complete=is_complete)
