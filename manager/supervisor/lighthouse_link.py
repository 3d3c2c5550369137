"""A supervisor's connection to the lighthouse.

`SupervisorLink` reconnects when its stream breaks, to another lighthouse if there are several. `Report`
(rules/restart_policy.py) decides what a new stream must repeat.
"""

import asyncio
import logging
from typing import Protocol

from lighthouse_protocol.coordinator import Coordinator, LeaderSearch
from lighthouse_protocol.messages import run
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    LighthouseError,
    NotLeader,
    NotServed,
    Unreachable,
    WrongProtocol,
)
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.client.streams import SupervisorStream
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.timing.pacing import Backoff
from manager.group.link import UnreachableLog
from manager.supervisor.rules.restart_policy import Report

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0  # how long to try to deliver a stop request to an unreachable lighthouse
CLOSE_TIMEOUT_S = 1.0


class Supervisor(Protocol):
    def receive(self, message: run.ToSupervisor) -> None:
        """Handle a message from the lighthouse. If the stream fails for good, the link passes a HelloRejected."""
        ...

    def heartbeat(self, now: float) -> run.SupervisorHeartbeat: ...

    def fail(self, status: int) -> None:
        """Make the supervisor exit with `status`. Called after an unexpected exception in the link."""
        ...


class SupervisorLink:
    """Keeps a supervisor's stream to the lighthouse open until the run ends.

    `entry` is the first message of each new stream. `supervisor` receives the lighthouse's messages.
    """

    def __init__(
        self, coordinator: Coordinator, job: str, run_id: str, entry: run.SupervisorHello, supervisor: Supervisor
    ) -> None:
        self._coordinator = coordinator
        self._job, self._run_id = job, run_id
        self._search = LeaderSearch(coordinator.addresses)
        self._entry = entry
        self._supervisor = supervisor
        self._stream: SupervisorStream | None = None
        self._report = Report(self._send)
        self._clock = asyncio.get_running_loop().time
        self._has_stop_arrived = asyncio.Event()
        self._has_answered = self._is_away = False
        self._unreachable_log = UnreachableLog()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = start_part(self._run(), "the stream to the lighthouse", self._supervisor.fail)

    def report_loss(self, lost: run.ProcessLost) -> None:
        self._report.add_loss(lost, self._clock())

    def ask_stop(self, reason: str) -> None:
        self._report.ask_stop(reason)

    def exclude(self, reason: str) -> None:
        self._report.exclude(reason)

    async def close(self) -> None:
        """Send the pending messages and close the stream.

        If a stop request is pending, wait up to STOP_TIMEOUT_S for the lighthouse to receive it, because the other
        supervisors may depend on it.
        """
        if self._task is None:
            return
        if self._report.stop is not None and not self._is_over:
            if self._stream is None:
                log.warning(
                    "the lighthouse will receive the stop when it is reachable again, within %g s",
                    STOP_TIMEOUT_S,
                    extra=event("stop_untold"),
                )
            waited = asyncio.create_task(self._has_stop_arrived.wait())
            await asyncio.wait((waited, self._task), timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            waited.cancel()
        self._is_over = True
        if self._stream is not None:
            self._stream.end()
            await asyncio.wait((self._task,), timeout=CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        backoff = Backoff()
        while not self._is_over:
            error: LighthouseError | None = None
            is_refused = False
            coordinator = self._coordinator.at(self._search.address)
            client = AsyncLighthouseClient(coordinator, job=self._job, run=self._run_id)
            async with client, client.supervise() as stream:
                try:
                    stream.send(self._entry)
                    async for message in stream:
                        is_refused = isinstance(message, run.HelloRejected)
                        if not is_refused:
                            backoff.reset()
                        self._search.mark_served()
                        self._receive(stream, message)
                    if not self._is_over and not is_refused:
                        self._set_error(f"{self._search.address} closed the stream")
                except (Unreachable, DeadlinePassed) as e:
                    error = e
                    if isinstance(e, WrongProtocol) and not self._has_answered:
                        self._receive(stream, run.HelloRejected(e))
                    elif not isinstance(e, NotLeader) or not e.leader:  # a redirect to the leader is not a failure
                        self._set_error(str(e))
                except NotServed:
                    log.warning(
                        "%s does not track runs: it does not see these ranks, and `lighthouse stop` has no effect",
                        self._search.address,
                        extra=event("runs_not_tracked", lighthouse=str(self._search.address)),
                    )
                    self._is_over = True
                    self._supervisor.receive(run.SupervisorWelcome(1.0))
                except LighthouseError as e:
                    is_refused = True
                    self._receive(stream, run.HelloRejected(e))
                finally:
                    self._stream = None
                    self._report.end_stream(self._clock())
            # A lighthouse that refuses a hello serves this job. Any other one would only redirect to it.
            if is_refused or self._search.mark_failed(error or Unreachable("it closed the stream")):
                await backoff.wait()

    def _receive(self, stream: SupervisorStream, message: run.ToSupervisor) -> None:
        if isinstance(message, run.HelloRejected) and not self._report.is_final(message.error, self._clock()):
            return self._set_error(str(message.error), "refused by the lighthouse")
        self._set_error("")
        match message:
            case run.SupervisorWelcome(interval_s):
                self._stream = stream
                self._report.begin_stream(self._clock())
                self._send_heartbeat(stream, interval_s)
            case run.RunStopped() | run.RunCompleted():  # the run has ended, so a stop request is obsolete
                self._has_stop_arrived.set()
            case run.HelloRejected():
                self._is_over = True
        return self._supervisor.receive(message)

    def _send_heartbeat(self, stream: SupervisorStream, interval_s: float) -> None:
        if self._stream is stream:
            stream.send(self._supervisor.heartbeat(self._clock()))
            asyncio.get_running_loop().call_later(interval_s, self._send_heartbeat, stream, interval_s)

    def _send(self, message: run.StopAsked | run.HostExcluded | run.ProcessLost) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _set_error(self, error: str, what: str = "lighthouse unreachable") -> None:
        if error:
            if text := self._unreachable_log.next_line(error, self._clock()):
                cost = "the ranks keep running" if self._has_answered else "the ranks start when it answers"
                log.warning("%s: %s; %s", what, text, cost, extra=event("lighthouse_lost"))
        else:
            if self._is_away:
                log.info("lighthouse reachable again", extra=event("lighthouse_answers"))
            self._unreachable_log.clear_error()
            self._has_answered = True
        self._is_away = bool(error)
