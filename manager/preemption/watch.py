"""Decides how a replica group reacts to preemption notices for its hosts, and carries out the decision."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.rules.preemption import ANSWER_WITHIN_S, Action, Plan, most_urgent, plan, save_left_s
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.timers import DeadlineTimer
from manager.group.driver import GroupDriver

log = logging.getLogger(__name__)


class PreemptionWatch:
    """Collects the notices for all hosts of a group. Reports the most urgent one, and drains the group when needed.

    The lighthouse answers each notice with the number of other groups that stay, and reports when none stays any more.
    If all groups are preempted at once, each group that has not left by then saves a checkpoint.
    """

    def __init__(self, group: GroupDriver, timers: Timers, wall: Callable[[], float] = time.time) -> None:
        self.notice: PreemptionNotice | None = None
        self.is_draining = False
        self._group = group
        self._wall = wall
        self._notices: dict[tuple[int, str], PreemptionNotice] = {}
        self._others: int | None = None
        self._asked_at = 0.0
        self._is_waiting = False  # for the lighthouse's answer
        self._has_agents = False  # at the time of the notice
        self._plan = Plan(Action.STAY, "")
        self._save_until = 0.0
        self._timer = DeadlineTimer(self._stop_waiting, timers)

    @property
    def save_left_s(self) -> float:
        """Seconds for which the ranks must keep running to save a checkpoint, or 0.

        While the lighthouse has not answered whether a save is needed, this is the time left for its answer.
        """
        match self._plan.action:
            case Action.ASK:
                return max(0.0, self._asked_at + ANSWER_WITHIN_S - self._wall())
            case Action.SAVE:
                return max(0.0, self._save_until - self._wall())
            case _:
                return 0.0

    @property
    def exit_left_s(self) -> float:
        """Seconds that the ranks have to exit before their host is taken away, or 0 without a notice."""
        if self.notice is None or self.notice.is_advice:
            return 0.0
        left_s = save_left_s(self.notice, self._wall())
        if self.notice.ends_at_unix_s is None:  # UNKNOWN_LEFT_S, counted from the notice
            left_s -= self._wall() - self._asked_at
        return max(0.0, left_s)

    def set_notice(self, host: int, source: str, notice: PreemptionNotice | None) -> None:
        """Record the current notice from one of a host's sources. `notice` is None if there is none."""
        self._notices.pop((host, source), None)
        if notice is not None:  # its texts come from a file or a server
            clean = replace(notice, reason=cut_reason(notice.reason), host=cut_reason(notice.host))
            self._notices[host, source] = clean
        self._replace_notice(most_urgent(self._notices.values()))

    def lose_host(self, host: int) -> None:
        for source in [source for of, source in self._notices if of == host]:
            self.set_notice(host, source, None)

    def record_answer(self, others: int) -> None:
        """Record the lighthouse's answer to a notice: the number of other groups that stay."""
        self._others = others
        self._decide()

    def close(self) -> None:
        self._timer.cancel()

    def _replace_notice(self, notice: PreemptionNotice | None) -> None:
        if notice == self.notice:
            return
        if notice is None:
            log.info("the preemption notice was withdrawn", extra=event("preemption_withdrawn"))
        else:
            left_s = notice.left_s(self._wall())
            log.warning("%s ends %s: %s (%s)", notice.host or "this host",
                        "at an unknown time" if left_s is None else f"in {left_s:.0f} s", notice.reason, notice.source,
                        extra=event("preemption", source=notice.source, left_s=left_s))  # fmt: skip
        self.notice, self._others, self._asked_at, self._is_waiting = notice, None, self._wall(), True
        self._has_agents = self._group.has_ranks
        self._group.report_preemption(notice)
        self._decide()

    def _stop_waiting(self) -> None:
        self._is_waiting = False  # even if the wall clock, which may be set back, shows less time
        self._decide()

    def _decide(self) -> None:
        now = self._wall()
        planned = plan(self.notice, self._others, now, self._asked_at if self._is_waiting else -math.inf)
        has_changed, self._plan = planned.action is not self._plan.action, planned
        self._save_until = now + planned.save_s
        self._group.set_preemption(self.notice, should_save=planned.action is Action.SAVE)
        self._timer.cancel()
        match planned.action:
            case Action.ASK:
                self._timer.set_after(ANSWER_WITHIN_S)
            case Action.DRAIN | Action.SAVE:
                if has_changed and self._has_agents:
                    log.info("the group leaves after its step: %s", planned.reason, extra=event("preemption_drain"))
                elif has_changed:
                    log.info("no Agent is connected: the ranks receive SIGTERM, and have %.0f s to save and exit",
                             self.exit_left_s, extra=event("preemption_drain"))  # fmt: skip
                if not self.is_draining:
                    self.is_draining = True
                    assert self.notice is not None
                    self._group.drain(f"preemption: {self.notice.reason}", is_revocable=True)
            case Action.STAY if self.is_draining:
                self.is_draining = not self._group.cancel_drain()
                text = "the notice was withdrawn too late: the group leaves" if self.is_draining else "the group stays"
                log.info(text, extra=event("preemption_drain_cancelled", is_cancelled=not self.is_draining))
            case Action.STAY:
                pass
