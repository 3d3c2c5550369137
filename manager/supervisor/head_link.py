"""The supervisor of a further host of a group: host 0 decides, this one does. Without host 0 nothing runs here."""

import asyncio
import logging
from collections.abc import Callable

from lighthouse_protocol.messages import hosts
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.manager import AsyncManagerClient
from lighthouse_runtime.client.stream_kinds import HostStream
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import host_id
from lighthouse_runtime.timing.backoff import Backoff
from manager.supervisor.local_host import LocalHost
from manager.supervisor.rules.events import CheckFailed, RankEnded
from manager.supervisor.worker_hosts import BEAT_S, SILENCE_S

log = logging.getLogger(__name__)


class HeadLink:
    """The stream to host 0, opened again and again. `host` makes the local one of the first welcome."""

    def __init__(
        self,
        connect: Callable[[], AsyncManagerClient],
        entry: hosts.HostHello,
        host: Callable[[hosts.HostWelcome], LocalHost],
        over: Callable[[hosts.GroupEnded], None],
        grace_s: float,
        timeout_s: float,
    ) -> None:
        self._connect = connect
        self._entry = entry
        self._make_host = host
        self._over = over
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._stream: HostStream | None = None
        self._looks: set[asyncio.Task[None]] = set()
        self.host: LocalHost | None = None

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def tell(self, event: RankEnded | CheckFailed) -> None:
        match event:
            case RankEnded(rank, attempt, status, cause):
                self._send(hosts.HostRankEnded(rank, attempt, status, cause))
            case CheckFailed(_, reason):
                self._send(hosts.HostCheckFailed(reason))

    def ask_end(self, status: int) -> None:
        self._send(hosts.HostEndAsked(status))

    async def run(self) -> None:
        """Until cancelled."""
        backoff, loop = Backoff(), asyncio.get_running_loop()
        lost_at = loop.time()
        while loop.time() < lost_at + self._timeout_s:
            was_open = await self._serve()
            if was_open:
                lost_at = loop.time()
                backoff.reset()
            await self._halt()
            await backoff.wait()
        self._over(hosts.GroupEnded(1, f"host 0 was unreachable for {self._timeout_s:g} s"))

    async def _serve(self) -> bool:
        """Whether host 0 was there."""
        async with self._connect() as client, client.host() as stream:
            try:
                stream.send(self._entry)
                async for message in stream:
                    self._stream = stream
                    self._receive(stream, message)
                log.warning("host 0 closed the stream", extra=event("head_lost"))
            except (Unreachable, DeadlinePassed) as e:
                log.warning("host 0 is unreachable: %s", e, extra=event("head_lost"))
            except LighthouseError as e:
                self._over(hosts.GroupEnded(1, f"host 0 refuses: {e}"))
            finally:
                was_open, self._stream = self._stream is not None, None
        return was_open

    async def _halt(self) -> None:
        """A group is whole or not at all: what runs here ends before host 0 is asked again."""
        if self.host is not None:
            self.host.halt(self.host.running, self._grace_s)
            await self.host.idle()

    def _receive(self, stream: HostStream, message: hosts.ToHost) -> None:
        self._expect(stream)
        match message:
            case hosts.HostWelcome():
                self.host = self.host or self._make_host(message)
                self._beat(stream)
            case hosts.StartRanks(ranks, attempt, unit):
                assert self.host is not None
                self.host.start(ranks, attempt, unit)
            case hosts.HaltRanks(ranks, grace_s):
                assert self.host is not None
                self.host.halt(ranks, grace_s)
            case hosts.ProbeRequest(host=host):
                if host == host_id():
                    task = asyncio.create_task(self._look(message))
                    self._looks.add(task)
                    task.add_done_callback(self._looks.discard)
            case hosts.GroupEnded():
                self._over(message)
            case hosts.HostHeartbeat():
                pass

    async def _look(self, asked: hosts.ProbeRequest) -> None:
        assert self.host is not None
        request = WatchHello(asked.rank, "", asked.pid, asked.host, asked.started, offer=asked.offer)
        self._send(hosts.ProbeResult(asked.number, await self.host.look(request)))

    def _send(self, message: hosts.FromHost) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _beat(self, stream: HostStream) -> None:
        if self._stream is stream:
            stream.send(hosts.HostHeartbeat())
            asyncio.get_running_loop().call_later(BEAT_S, self._beat, stream)

    def _expect(self, stream: HostStream) -> None:
        """A host 0 that has vanished says nothing."""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()

        def judge() -> None:
            if self._stream is stream and loop.time() >= self._heard_at + SILENCE_S:
                stream.cancel(Unreachable(f"it was silent for {SILENCE_S:g} s"))

        loop.call_later(SILENCE_S, judge)
