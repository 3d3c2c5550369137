"""Where the ranks are: samples come on their watches, a verdict goes to the log, and heartbeats carry the view."""

import logging
from collections.abc import Callable
from dataclasses import replace

from lighthouse_protocol.messages.membership import Assignment, Participant
from lighthouse_protocol.messages.progress import GroupView, ProgressSample
from lighthouse_protocol.rules.group_progress import GroupProgress, Process
from lighthouse_protocol.rules.stall import Limits, StallVerdict
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.stall_watch import StallWatch
from manager.group.watches import Watch

log = logging.getLogger(__name__)


class GroupProgressDriver:
    """`incarnation` is the group's present one. `check_lag` calls `was_late` if the process itself was held up."""

    def __init__(
        self,
        me: Participant,
        limits: Limits,
        timers: Timers,
        incarnation: Callable[[], str],
        check_lag: Callable[[], None] = lambda: None,
    ) -> None:
        self._size = me.group_world_size
        self._progress = GroupProgress(me.replica_id, limits)
        self._is_alone = False  # the only group of its quorum
        self._incarnation = incarnation
        self._newest: dict[int, Watch] = {}  # by rank
        self._clock = timers.time
        self._check_lag = check_lag
        self._watch = StallWatch(timers, log, "", self._verdict, self._progress.left_s, limits.floor_s)

    def opened(self, watch: Watch) -> None:
        self._newest[watch.hello.group_rank] = watch

    def answered(self, assignment: Assignment) -> None:
        """A rank was let into a step."""
        self._is_alone = assignment.replica_world_size == 1

    def take(self, watch: Watch, sample: ProgressSample) -> None:
        """A sample of an old watch says nothing of the rank's newer one."""
        hello = watch.hello
        if self._newest.get(hello.group_rank) is watch:
            process = Process(hello.rank_incarnation, hello.hostname, hello.pid)
            self._progress.take(hello.group_rank, process, sample, self._clock())
            self._watch.wake()

    def ended(self, watch: Watch) -> None:
        group_rank = watch.hello.group_rank
        if self._newest.get(group_rank) is watch:
            del self._newest[group_rank]
            self._progress.lose(group_rank)

    def was_late(self, by_s: float) -> None:
        """The whole process was held up; to be told before anything is judged."""
        self._progress.was_late(by_s, self._clock())

    def view(self, now: float) -> GroupView:
        self._check_lag()
        return replace(self._progress.view(self._incarnation(), now), group_world_size=self._size)

    def close(self) -> None:
        self._watch.close()

    def _verdict(self, now: float) -> StallVerdict | None:
        self._check_lag()
        samples = [rank.sample for rank in self._progress.ranks(now)]
        is_among_itself = all(_is_within_group(sample) for sample in samples)
        is_complete = len(samples) == self._size and (is_among_itself or self._is_alone)
        return self._progress.verdict(now, is_complete=is_complete)


def _is_within_group(sample: ProgressSample) -> bool:
    """What it waits for is a rank of its own group."""
    return bool(sample.at) or (sample.collective is not None and sample.collective.within_group)
