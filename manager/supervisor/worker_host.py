"""Supervisor of a group's other hosts: `lighthouse-manager run --node-rank K` with K > 0.

`HeadLink` is its connection to host 0, which decides when ranks start and stop. `WorkerHost` also holds a stream to the
lighthouse, which can stop the run. Without a connection to host 0 no rank runs on this host.
"""

import asyncio
import logging
import signal
from collections.abc import Callable

from lighthouse_protocol.identity import parse_target
from lighthouse_protocol.limits import MANAGER_PORT
from lighthouse_protocol.messages import hosts
from lighthouse_protocol.messages.hosts import GroupEnded, HostHello, HostWelcome
from lighthouse_protocol.messages.run import (
    HelloRejected,
    RunCompleted,
    RunStopped,
    SupervisorHeartbeat,
    SupervisorWelcome,
    ToSupervisor,
)
from lighthouse_protocol.messages.session import WatchHello
from lighthouse_protocol.refusals import DeadlinePassed, LighthouseError, Unreachable
from lighthouse_runtime.client.clients import AsyncManagerClient
from lighthouse_runtime.client.stream_kinds import HostStream
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import host_id
from lighthouse_runtime.process.loop import ServiceManager, on_signals
from lighthouse_runtime.timing.pacing import Backoff
from manager.guard.client import GuardClient
from manager.supervisor.head_host import HEARTBEAT_S, SILENCE_S
from manager.supervisor.local_host import Launch, LocalHost
from manager.supervisor.rules.events import CheckFailed, RankEnded
from manager.supervisor.rules.machine import STOP_GRACE_S, STOPPED_STATUS

log = logging.getLogger(__name__)


class HeadLink:
    """Stream to host 0, reopened when it breaks. `host` creates the local host on the first welcome."""

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
        self._probes: set[asyncio.Task[None]] = set()
        self.host: LocalHost | None = None

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def report(self, event: RankEnded | CheckFailed) -> None:
        match event:
            case RankEnded(rank, attempt, status, cause):
                self._send(hosts.HostRankEnded(rank, attempt, status, cause))
            case CheckFailed(_, reason):
                self._send(hosts.HostCheckFailed(reason))

    def ask_end(self, status: int) -> None:
        self._send(hosts.HostEndAsked(status))

    async def run(self) -> None:
        """Serve host 0's orders until cancelled, or until host 0 was unreachable for the timeout."""
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
        """Serve one stream, and return whether host 0 answered."""
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
        """Stop the ranks of this host before reconnecting: a group runs completely or not at all."""
        if self.host is not None:
            self.host.halt(self.host.running, self._grace_s)
            await self.host.idle()

    def _receive(self, stream: HostStream, message: hosts.ToHost) -> None:
        self._watch_silence(stream)
        match message:
            case hosts.HostWelcome():
                self.host = self.host or self._make_host(message)
                self._send_heartbeat(stream)
            case hosts.StartRanks(ranks, attempt, unit):
                assert self.host is not None
                self.host.start(ranks, attempt, unit)
            case hosts.HaltRanks(ranks, grace_s):
                assert self.host is not None
                self.host.halt(ranks, grace_s)
            case hosts.ProbeRequest(host=host):
                if host == host_id():
                    task = asyncio.create_task(self._probe(message))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
            case hosts.GroupEnded():
                self._over(message)
            case hosts.HostHeartbeat():
                pass

    async def _probe(self, asked: hosts.ProbeRequest) -> None:
        assert self.host is not None
        request = WatchHello(asked.rank, "", asked.pid, asked.host, asked.started, offer=asked.offer)
        self._send(hosts.ProbeResult(asked.number, await self.host.probe(request)))

    def _send(self, message: hosts.FromHost) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _send_heartbeat(self, stream: HostStream) -> None:
        if self._stream is stream:
            stream.send(hosts.HostHeartbeat())
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._send_heartbeat, stream)

    def _watch_silence(self, stream: HostStream) -> None:
        """Cancel the stream if host 0 is silent for SILENCE_S."""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()

        def judge() -> None:
            if self._stream is stream and loop.time() >= self._heard_at + SILENCE_S:
                stream.cancel(Unreachable(f"it was silent for {SILENCE_S:g} s"))

        loop.call_later(SILENCE_S, judge)


_SLACK_S = 10.0


class WorkerHost:
    """Supervisor of a host other than 0. `run` returns the exit status."""

    def __init__(self, launch: Launch, guard: GuardClient) -> None:
        self._launch = launch
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        config, settings = launch.config, launch.settings
        self._manager = str(parse_target(settings.head or "", "--head", MANAGER_PORT))
        entry = HostHello(
            config.replica_id,
            settings.run_id,
            settings.node_rank,
            settings.nnodes,
            settings.nproc_per_node,
            launch.incarnation,
        )
        self._head = HeadLink(
            lambda: AsyncManagerClient(self._manager, launch.group_secret),
            entry,
            self._make_host,
            self._over,
            settings.termination_grace_s,
            settings.node_timeout_s,
        )
        plan = launch.plan(self._manager, ("", settings.master_port))
        self._link = launch.run_link(plan, self._receive_from_lighthouse, self._heartbeat)
        self._orders: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._end_of: asyncio.Future[GroupEnded] = self._loop.create_future()
        self._signals = 0

    def _heartbeat(self, _: float) -> SupervisorHeartbeat:
        """Report the running ranks; host 0 reports the group's restarts."""
        host = self._head.host
        return SupervisorHeartbeat(running=0 if host is None else len(host.running))

    async def run(self) -> int:
        on_signals(self._loop, lambda number: self._signalled(128 + number), self._pass_on)
        guarding = asyncio.create_task(self._watch_guard(), name="guard")
        self._link.open()
        systemd = ServiceManager(self._loop, lambda: f"host {self._launch.settings.node_rank} of its replica group")
        systemd.ready()
        try:
            over = await self._end_of
            systemd.stopping()
            (log.info if over.status == 0 or self._signals else log.error)(
                "exits with %d: %s", over.status, over.why, extra=event("supervisor_ends", status=over.status)
            )
            if over.excluded:
                self._link.exclude(over.excluded)
            await self._link.close()
            return over.status
        finally:
            guarding.cancel()
            tasks = [task for task in (self._orders, self._ending) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._guard.stop()
            systemd.close()

    def _make_host(self, welcome: HostWelcome) -> LocalHost:
        plan = self._launch.plan(self._manager, (welcome.master_address, welcome.master_port))
        return self._launch.local_host(plan, self._guard, self._head.report, self._link.lose)

    def _receive_from_lighthouse(self, message: ToSupervisor) -> None:
        match message:
            case SupervisorWelcome():
                self._orders = self._orders or asyncio.create_task(self._head.run(), name="host 0")
            case RunStopped():
                over = GroupEnded(STOPPED_STATUS, f"the run is stopped: {message.text}")
                self._end(over, min(self._launch.settings.termination_grace_s, STOP_GRACE_S))
            case RunCompleted(number) if self._orders is None:
                self._over(GroupEnded(0, f"the run has completed, with generation {number}"))
            case RunCompleted():
                pass
            case HelloRejected(error):
                self._over(GroupEnded(1, f"this supervisor was refused by the lighthouse: {error}"))

    def _signalled(self, status: int) -> None:
        """Handle a stop signal: the first asks host 0 to end the group, the second ends this host, the third kills."""
        self._signals += 1
        over = GroupEnded(status, f"{signal.Signals(status - 128).name} to the supervisor")
        settings = self._launch.settings
        if self._signals == 1 and self._head.is_open:
            self._head.ask_end(status)
            patience_s = self._launch.config.drain_timeout_s + settings.termination_grace_s + _SLACK_S
            self._loop.call_later(patience_s, self._over, over)
            return
        self._end(over, settings.termination_grace_s if self._signals < 3 else 0.0)

    def _pass_on(self, number: int) -> None:
        if self._head.host is not None:
            self._head.host.pass_on(number)

    def _over(self, over: GroupEnded) -> None:
        self._end(over, self._launch.settings.termination_grace_s)

    def _end(self, over: GroupEnded, grace_s: float) -> None:
        """Stop this host's ranks, then end. The first reason counts; later calls can shorten the grace period."""
        if self._head.host is not None:
            self._head.host.halt(self._head.host.running, grace_s)
        self._ending = self._ending or asyncio.create_task(self._finish(over), name="end")

    async def _finish(self, over: GroupEnded) -> None:
        if self._head.host is not None:
            await self._head.host.idle()
        if not self._end_of.done():
            self._end_of.set_result(over)

    async def _watch_guard(self) -> None:
        status = await self._guard.run()
        if not self._end_of.done():
            self._end_of.set_result(GroupEnded(1, f"the guard of the ranks ended with {status}, and the ranks with it"))
