"""Injects the faults of `lighthouse chaos` into a replica group. Without --allow-chaos, it refuses them.

`FaultInjector` stands between the group's driver and its link to the lighthouse. It carries out the orders of the
lighthouse, and drops or delays the messages from both sides while such a fault lasts. A fault ends after its duration,
when the lighthouse orders it, when the manager stops or, unless it is a cut, when the session with the lighthouse
closes. A timer in this process resumes a stopped rank. If this process dies first, the guard kills the rank.
"""

import logging
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lighthouse_protocol.messages.chaos import FaultCancelled, FaultKind, FaultOrder, FaultReport
from lighthouse_protocol.messages.session import ToLighthouse, ToManager
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, NotPermitted, WrongState
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timer, Timers
from manager.group.driver import GroupDriver, LighthousePort

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """Interface to the group's supervisor, which sends signals to its ranks."""

    def send_signal(self, rank: int | None, number: int, *, is_largest: bool = False) -> None:
        """Send signal `number` to all processes of `rank`, or of all ranks if None.

        If `is_largest`, signal only the process of each rank that uses the most memory. Raise WrongState if no rank is
        running.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: FaultKind
    end: Callable[[], object]
    timer: Timer


class FaultInjector:
    """LighthousePort that injects faults. While no fault affects the link, it passes all messages through."""

    def __init__(
        self, replica_id: str, link: LighthousePort, ranks: Ranks | None, timers: Timers, *, is_allowed: bool
    ) -> None:
        self._replica_id = replica_id
        self._link = link
        self._ranks = ranks
        self._is_allowed = is_allowed
        self._timers = timers
        self._faults: dict[int, _Fault] = {}
        self._is_cut = False
        self._delay_s = 0.0
        self._late: deque[tuple[Callable[[Any], None], Any]] = deque()  # delayed messages, the oldest first

    # -- LighthousePort

    @property
    def error(self) -> str:
        return self._link.error

    def send(self, message: ToLighthouse) -> None:
        self._pass(self._link.send, message)

    def give_up(self, reason: str) -> None:
        self._link.give_up(reason)

    def connect_second(self, reason: str) -> None:
        self._link.connect_second(reason)

    def cancel_second(self) -> None:
        self._link.cancel_second()

    # -- the link

    def between(
        self, driver: GroupDriver
    ) -> tuple[Callable[[], None], Callable[[ToManager], None], Callable[[bool], None]]:
        """Return the arguments `opened`, `received` and `closed` for LighthouseLink.run.

        These callbacks carry out the lighthouse's fault orders, and pass all other events to `driver`.
        """

        def opened() -> None:
            self._late.clear()  # messages of the previous session
            driver.begin_session()

        def received(message: ToManager) -> None:
            match message:
                case FaultOrder():
                    self._inject_fault(message, driver)
                case FaultCancelled(number):
                    self._end_fault(number)
                case _:
                    self._pass(driver.handle_message, message)

        def closed(is_moving: bool) -> None:
            for number in [number for number, fault in self._faults.items() if fault.kind is not FaultKind.CUT]:
                self._end_fault(number)
            driver.end_session(is_moving=is_moving)

        return opened, received, closed

    def close(self) -> None:
        for number in list(self._faults):
            self._end_fault(number)

    def _pass(self, deliver: Callable[[Any], None], message: Any) -> None:
        if self._is_cut:
            return
        if not self._delay_s and not self._late:
            deliver(message)
            return
        self._late.append((deliver, message))
        self._timers.call_later(self._delay_s, self._deliver_late)

    def _deliver_late(self) -> None:
        if self._late:
            deliver, message = self._late.popleft()
            deliver(message)

    # -- faults

    def _inject_fault(self, order: FaultOrder, driver: GroupDriver) -> None:
        report = FaultReport(order.number, driver.status().step)
        try:
            end = self._start(order, driver)
        except LighthouseError as e:
            self._link.send(replace(report, error=e))
            return
        target = self._replica_id if order.group_rank is None else f"{self._replica_id}/{order.group_rank}"
        fields = event("fault", kind=order.kind, target=target, seconds=order.seconds)
        log.warning("lighthouse chaos: %s %s for %.3g s", order.kind, target, order.seconds, extra=fields)
        self._link.send(report)  # a cut or a delay does not affect it
        timer = self._timers.call_later(order.seconds, self._end_fault, order.number)
        self._faults[order.number] = _Fault(FaultKind(order.kind), end, timer)

    def _end_fault(self, number: int) -> None:
        if (fault := self._faults.pop(number, None)) is not None:
            fault.timer.cancel()
            fault.end()

    def _start(self, order: FaultOrder, driver: GroupDriver) -> Callable[[], object]:
        """Start a fault, and return the function that ends it. Raise LighthouseError if the fault is not possible."""
        if not self._is_allowed:
            raise NotPermitted(f"the manager of replica group {self._replica_id} was started without --allow-chaos")
        if order.kind not in set(FaultKind):
            known = ", ".join(FaultKind)
            raise InvalidRequest(
                f"{order.kind!r} is unknown to the manager of replica group {self._replica_id}, which knows {known}; "
                "install the lighthouse's version on its host",
                field="kind",
            )
        order.check_limits()
        kind, rank, seconds = FaultKind(order.kind), order.group_rank, order.seconds
        if any(fault.kind is kind for fault in self._faults.values()):
            raise WrongState(f"{self._replica_id}: another fault of kind {kind} has not ended yet")
        match kind:
            case FaultKind.CUT:
                self._is_cut = True
                return self._end_cut
            case FaultKind.SLOW:
                self._delay_s = order.delay_s
                return self._end_delay
            case FaultKind.NAN | FaultKind.DISK:
                if rank is None or not driver.send_to_rank(rank, FaultOrder(order.number, kind, rank, seconds)):
                    raise WrongState(f"{self._replica_id}/{rank}: no Agent of this rank is connected to its manager")
                return lambda: driver.send_to_rank(rank, FaultOrder(order.number, kind, rank))
            case FaultKind.KILL | FaultKind.OOM | FaultKind.STOP:
                return self._signal(kind, rank)

    def _signal(self, kind: FaultKind, rank: int | None) -> Callable[[], object]:
        ranks = self._ranks
        if ranks is None:
            raise WrongState(
                f"{self._replica_id}: {kind} needs supervised ranks: start them with lighthouse-manager run"
            )
        if kind is not FaultKind.STOP:
            ranks.send_signal(rank, signal.SIGKILL, is_largest=kind is FaultKind.OOM)
            return lambda: None
        ranks.send_signal(rank, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(LighthouseError):  # the rank was killed meanwhile
                ranks.send_signal(rank, signal.SIGCONT)

        return go_on

    def _end_cut(self) -> None:
        self._is_cut = False
        self._link.give_up("lighthouse chaos: the cut has ended")  # the session has missed messages

    def _end_delay(self) -> None:
        self._delay_s = 0.0
