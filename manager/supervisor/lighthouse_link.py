"""A supervisor's stream to the lighthouse: who may start, that the run has stopped, who has died and why.

What must arrive is a level and said again on each new stream: a stop that was asked for, a host that is excluded. Who
was lost while the lighthouse was away, or so shortly before that it may not have heard so, is told when it is back; it
counts a loss once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from lighthouse_protocol.messages.run import Done, Refusal, Stop
from lighthouse_protocol.messages.supervisor import (
    HostExcluded,
    StopAsked,
    SupervisorBeat,
    SupervisorEntry,
    SupervisorWelcome,
    ToSupervisor,
    WorkerLost,
)
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, NotServed, Unreachable, WrongProtocol
from lighthouse_runtime.client.lighthouse import AsyncLighthouseClient
from lighthouse_runtime.client.streams import SupervisorStream
from lighthouse_runtime.timing.backoff import Backoff
from manager.group.lighthouse_link import Absence

log = logging.getLogger(__name__)

MAX_KEPT_LOSSES = 1000
STOP_TIMEOUT_S = 60.0  # how long a stop that was asked for is kept for a lighthouse that is away
CLOSE_TIMEOUT_S = 1.0
DOUBT_S = 60.0  # what was said so long before a stream broke has arrived: a dead connection is noticed sooner


class SupervisorLink:
    """`hear` is called with each message, a Refusal for whatever else ends the stream for good."""

    def __init__(
        self,
        connect: Callable[[], AsyncLighthouseClient],
        address: str,
        entry: SupervisorEntry,
        hear: Callable[[ToSupervisor], None],
    ) -> None:
        self._connect = connect
        self._address = address
        self._entry = entry
        self._hear = hear
        self._stream: SupervisorStream | None = None
        self._losses: deque[WorkerLost] = deque(maxlen=MAX_KEPT_LOSSES)
        self._told: deque[tuple[float, WorkerLost]] = deque(maxlen=MAX_KEPT_LOSSES)
        self._stop: StopAsked | None = None
        self._excluded: HostExcluded | None = None
        self._has_heard_stop = asyncio.Event()
        self._has_answered = self._is_away = False
        self._absence = Absence()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._run(), name="run")

    def lose(self, lost: WorkerLost) -> None:
        self._losses.append(lost)
        self._send_losses()

    def ask_stop(self, reason: str) -> None:
        self._stop = StopAsked(reason)
        self._send(self._stop)

    def exclude(self, reason: str) -> None:
        self._excluded = HostExcluded(reason)
        self._send(self._excluded)

    async def close(self) -> None:
        """Says what is left to say. A stop that was asked for is waited for: nobody else may know of it."""
        if self._task is None:
            return
        if self._stop is not None and not self._is_over:
            if self._stream is None:
                log.warning("the lighthouse is told of the stop when it is back, within %g s", STOP_TIMEOUT_S)
            waited = asyncio.create_task(self._has_heard_stop.wait())
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
            async with self._connect() as client, client.supervise() as stream:
                try:
                    stream.send(self._entry)
                    async for message in stream:
                        backoff.reset()
                        self._receive(stream, message)
                    if not self._is_over:
                        self._note(f"{self._address} has ended the stream")
                except (Unreachable, DeadlinePassed) as e:
                    if isinstance(e, WrongProtocol) and not self._has_answered:
                        self._receive(stream, Refusal(e))
                    else:
                        self._note(str(e))
                except NotServed:
                    log.warning("%s keeps no runs: supervised without; a stop is not heard of", self._address)
                    self._is_over = True
                    self._hear(SupervisorWelcome(1.0))
                except LighthouseError as e:
                    self._receive(stream, Refusal(e))
                finally:
                    self._stream = None
                    self._doubt()
            await backoff.wait()

    def _receive(self, stream: SupervisorStream, message: ToSupervisor) -> None:
        self._note("")
        match message:
            case SupervisorWelcome(beat_interval_s):
                self._welcomed(stream, beat_interval_s)
            case Stop():
                self._has_heard_stop.set()
            case Refusal():
                self._is_over = True
            case Done():
                pass
        self._hear(message)

    def _welcomed(self, stream: SupervisorStream, beat_interval_s: float) -> None:
        self._stream = stream
        for level in (self._excluded, self._stop):
            if level is not None:
                self._send(level)
        self._send_losses()
        self._beat(stream, beat_interval_s)

    def _beat(self, stream: SupervisorStream, interval_s: float) -> None:
        if self._stream is stream:
            stream.send(SupervisorBeat())
            asyncio.get_running_loop().call_later(interval_s, self._beat, stream, interval_s)

    def _send(self, message: StopAsked | HostExcluded | WorkerLost) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _send_losses(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._stream is not None and self._losses:
            lost = self._losses.popleft()
            self._send(lost)
            self._told.append((now, lost))

    def _doubt(self) -> None:
        """The stream has ended: what was told last is told again."""
        since = asyncio.get_running_loop().time() - DOUBT_S
        doubtful = [lost for told_at, lost in self._told if told_at >= since]
        self._told.clear()
        self._losses = deque((*doubtful, *self._losses), maxlen=MAX_KEPT_LOSSES)

    def _note(self, error: str) -> None:
        if error:
            if text := self._absence.noted(error, asyncio.get_running_loop().time()):
                log.warning("lighthouse lost: %s; %s", text, self._consequence())
        else:
            if self._is_away:
                log.info("lighthouse back")
            self._absence.ended()
            self._has_answered = True
        self._is_away = bool(error)

    def _consequence(self) -> str:
        return "the ranks are supervised all the same" if self._has_answered else "the ranks start when it answers"
