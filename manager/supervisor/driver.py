"""Driver of a group's supervision.

`SupervisorDriver` feeds events to a `SupervisorMachine`, performs the effects in order and sets one timer for the next
deadline. It is synchronous. The clock, the hosts and the lighthouse are passed in, so the simulator runs the same code.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from lighthouse_protocol.messages import run as messages
from lighthouse_protocol.messages.run import SupervisorWelcome, ToSupervisor
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.timers import DeadlineTimer
from manager.supervisor.rules import events
from manager.supervisor.rules.machine import SupervisorMachine

log = logging.getLogger(__name__)


class Group(Protocol):
    """Interface through which the driver acts on the group's hosts, which are numbered from 0, and on the run."""

    def start(self, host: int, ranks: Sequence[int], attempt: int) -> None: ...

    def halt(self, host: int, ranks: Sequence[int], grace_s: float) -> None: ...

    def ask_stop(self, reason: str) -> None: ...

    def exclude(self, host: int, reason: str) -> None: ...

    def finish(self, over: events.SupervisionEnded) -> None:
        """End the supervisor with `over.status`. Called once, when no rank is running and none will be started."""
        ...


class SupervisorDriver:
    def __init__(self, machine: SupervisorMachine, timers: Timers, group: Group) -> None:
        self.machine = machine
        self._clock = timers.time
        self._timer = DeadlineTimer(lambda: self._perform(machine.tick(timers.time())), timers)
        self._group = group

    def receive(self, message: ToSupervisor) -> None:
        """Handle a message from the lighthouse."""
        match message:
            case SupervisorWelcome():
                self.feed(events.HostReady(0))
            case messages.RunStopped():
                self.feed(events.RunStopped(message.text))
            case messages.RunCompleted(number):
                self.feed(events.RunCompleted(f"the run has completed, with generation {number}"))
            case messages.HelloRejected(error):
                self.feed(events.EndAsked(1, f"this supervisor was refused by the lighthouse: {error}"))

    def handle_manager_exit(self, status: int, grace_s: float, *, is_saving: bool = False) -> None:
        """Handle the exit of the group's manager. Status 0 means that the group has drained. Any other is an error.

        `grace_s` is the time until a preempted host is taken away, or 0 without a preemption notice. After a drain,
        ranks get this time to exit if it exceeds --termination-grace.

        If `is_saving`, the ranks may still save a checkpoint, and a second call ends them. Until then, a rank that
        fails is no loss: a restart would end the saves of the other ranks, and the group has left anyway.
        """
        if status == 0:
            why = "the group has left its quorum"
            self.feed(events.EndAsked(0, why, is_leaving=is_saving, grace_s=grace_s))
        else:
            self.feed(events.EndAsked(1, "its manager cannot continue; see above"))

    def feed(self, event: events.Event) -> None:
        self._perform(self.machine.handle(event, self._clock()))

    def close(self) -> None:
        self._timer.cancel()

    def _perform(self, effects: Sequence[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Logged(text, is_asked):
                    log.log(logging.INFO if is_asked else logging.WARNING, "%s", text, extra=event("supervision"))
                case events.Start(host, ranks, attempt):
                    self._group.start(host, ranks, attempt)
                case events.Halt(host, ranks, grace_s):
                    self._group.halt(host, ranks, grace_s)
                case events.RunStopAsked(reason):
                    self._group.ask_stop(reason)
                case events.HostExcluded(host, reason):
                    self._group.exclude(host, reason)
                case events.SupervisionEnded():
                    self._group.finish(effect)
        self._timer.set(self.machine.deadline())
