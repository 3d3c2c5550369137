"""Supervisor on each host of a group except host 0: `lighthouse-manager run --node-rank K` with K > 0.

`WorkerHost` keeps a stream open to host 0, which decides when ranks start and stop, and another one to the lighthouse,
which can stop the run. While host 0 is not connected, no rank runs on this host.
"""

import asyncio
import logging
import signal
import time

from lighthouse_protocol.identity import parse_target
from lighthouse_protocol.limits import MANAGER_PORT
from lighthouse_protocol.messages import hosts
from lighthouse_protocol.messages.hosts import GroupEnded
from lighthouse_protocol.messages.preemption import PreemptionNotice, PreemptionReport
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
from lighthouse_protocol.rules.preemption import most_urgent
from lighthouse_runtime.client.clients import AsyncManagerClient
from lighthouse_runtime.client.streams import HostStream
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.children import host_id
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.timing.pacing import Backoff
from manager.group.link import UnreachableLog
from manager.guard.client import GuardClient
from manager.supervisor.head_host import HEARTBEAT_S, SILENCE_S
from manager.supervisor.local_host import HostSupervisor, Launch, LocalHost
from manager.supervisor.rules.events import CheckFailed, CheckPassed, RankEnded
from manager.supervisor.rules.machine import STOP_GRACE_S, STOPPED_STATUS

log = logging.getLogger(__name__)


_SLACK_S = 10.0


class WorkerHost(HostSupervisor):
    """Supervisor on a host other than host 0. It starts and stops ranks on orders from host 0."""

    def __init__(self, launch: Launch, guard: GuardClient) -> None:
        super().__init__(launch, guard)
        settings = launch.settings
        self._manager = str(parse_target(settings.head or "", "--head", MANAGER_PORT))
        plan = launch.plan(self._manager, ("", settings.master_port))
        self._link = launch.run_link(plan, self)
        self._stream: HostStream | None = None  # stream to host 0, once host 0 has answered
        self._unreachable_log = UnreachableLog()
        self._heard_at = 0.0  # when the last message from host 0 arrived
        self._probes: set[asyncio.Task[None]] = set()
        self._orders: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._end_asked: GroupEnded | None = None  # set when host 0 has been asked to end the group
        self._notices: dict[str, PreemptionNotice | None] = {}

    def _state(self) -> str:
        return f"host {self._launch.settings.node_rank} of its replica group"

    async def _begin(self) -> None:
        self._link.open()

    async def _end(self, over: GroupEnded) -> None:
        if over.excluded:
            self._link.exclude(over.excluded)
        await self._link.close()

    async def _close(self) -> None:
        tasks = [task for task in (self._orders, self._ending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def handle_signal(self, status: int) -> None:
        """Handle a stop signal.

        After the first signal, ask host 0 to end the group. If the stream to host 0 closes before the end, or after the
        second signal, stop this host's ranks. After the third, kill them.
        """
        self._signals[0] += 1
        over = GroupEnded(status, f"{signal.Signals(status - 128).name} to the supervisor")
        grace_s = self._launch.settings.termination_grace_s
        if self._signals[0] == 1 and self._stream is not None:
            log.info("%s: host 0 is asked to end the group", over.why, extra=event("end_asked", status=status))
            self._send(hosts.HostEndAsked(status))
            self._end_asked = over
            notice_s = (self._notice and self._notice.left_s(time.time())) or 0.0
            patience_s = max(notice_s, self._launch.config.drain_timeout_s + grace_s) + _SLACK_S
            self._loop.call_later(patience_s, self._halt_and_finish, over, grace_s)
            return
        self._halt_and_finish(over, grace_s if self._signals[0] < 3 else 0.0)

    def _halt_and_finish(self, over: GroupEnded, grace_s: float) -> None:
        """Stop this host's ranks, then exit with `over.status`. Further calls can only shorten the grace period."""
        if self._local is not None:
            self._local.halt(self._local.running, grace_s)
        self._ending = self._ending or start_part(self._finish_when_idle(over), "the end", self.fail)

    async def _finish_when_idle(self, over: GroupEnded) -> None:
        if self._local is not None:
            await self._local.idle()
        self._finish(over)

    def handle_notice(self, source: str, notice: PreemptionNotice | None) -> None:
        before = self._notice
        self._notices[source] = notice
        if self._notice != before:
            self._send(PreemptionReport(self._notice))

    @property
    def _notice(self) -> PreemptionNotice | None:
        return most_urgent(notice for notice in self._notices.values() if notice is not None)

    # -- the lighthouse

    def heartbeat(self, now: float) -> SupervisorHeartbeat:
        """Return a heartbeat with the number of running ranks on this host. Host 0 reports the group's restarts."""
        return SupervisorHeartbeat(running=0 if self._local is None else len(self._local.running))

    def receive(self, message: ToSupervisor) -> None:
        grace_s = self._launch.settings.termination_grace_s
        match message:
            case SupervisorWelcome():
                self._orders = self._orders or start_part(self._serve_head(), "the link to host 0", self.fail)
            case RunStopped():
                over = GroupEnded(STOPPED_STATUS, f"the run is stopped: {message.text}")
                self._halt_and_finish(over, min(grace_s, STOP_GRACE_S))
            case RunCompleted(number) if self._orders is None:
                self._halt_and_finish(GroupEnded(0, f"the run has completed, with generation {number}"), grace_s)
            case RunCompleted():
                pass
            case HelloRejected(error):
                why = f"this supervisor was refused by the lighthouse: {error}"
                self._halt_and_finish(GroupEnded(1, why), grace_s)

    # -- host 0

    async def _serve_head(self) -> None:
        """Carry out host 0's orders until cancelled, or until host 0 has been unreachable for --node-timeout."""
        settings, backoff = self._launch.settings, Backoff()
        lost_at = self._loop.time()
        while self._loop.time() < lost_at + settings.node_timeout_s:
            if await self._serve_stream():
                lost_at = self._loop.time()
                backoff.reset()
            if self._end_asked is not None:  # host 0 may not have received the request
                self._halt_and_finish(self._end_asked, settings.termination_grace_s)
                return
            if self._local is not None:  # stop the ranks of this host, because a group runs completely or not at all
                self._local.halt(self._local.running, settings.termination_grace_s)
                await self._local.idle()
            await backoff.wait()
        why = f"host 0 was unreachable for {settings.node_timeout_s:g} s"
        self._halt_and_finish(GroupEnded(1, why), settings.termination_grace_s)

    async def _serve_stream(self) -> bool:
        """Open a stream to host 0, and carry out orders until it closes. Return whether host 0 answered."""
        config, settings = self._launch.config, self._launch.settings
        hello = hosts.HostHello(
            config.replica_id,
            settings.run_id,
            settings.node_rank,
            settings.nnodes,
            settings.nproc_per_node,
            self._launch.incarnation,
            settings.keep_every,
        )
        async with AsyncManagerClient(self._manager, self._launch.group_secret) as client, client.host() as stream:
            try:
                stream.send(hello)
                async for message in stream:
                    self._stream = stream
                    self._receive_order(stream, message)
                self._log_lost_head("host 0 closed the stream")
            except (Unreachable, DeadlinePassed) as e:
                self._log_lost_head(f"host 0 is unreachable: {e}")
            except LighthouseError as e:
                self._halt_and_finish(GroupEnded(1, f"host 0 refuses: {e}"), settings.termination_grace_s)
            finally:
                was_open, self._stream = self._stream is not None, None
        return was_open

    def _log_lost_head(self, why: str) -> None:
        if text := self._unreachable_log.next_line(why, self._loop.time()):
            log.warning("%s", text, extra=event("head_lost"))

    def _receive_order(self, stream: HostStream, message: hosts.ToHost) -> None:
        self._heard_at = self._loop.time()
        self._loop.call_later(SILENCE_S, self._check_silence, stream)
        match message:
            case hosts.HostWelcome(address, port):
                self._unreachable_log.clear_error()
                if self._notices:
                    self._send(PreemptionReport(self._notice))
                plan = self._launch.plan(self._manager, (address, port))
                if self._local is None:
                    self._local = LocalHost(plan, self._guard, self._launch.settings, self._link, self._report)
                self._local.plan = plan  # if host 0 has restarted, its address may have changed
                self._send_heartbeat(stream)
            case hosts.StartRanks(ranks, attempt, unit):
                assert self._local is not None
                self._local.start(ranks, attempt, unit)
            case hosts.HaltRanks(ranks, grace_s):
                assert self._local is not None
                self._local.halt(ranks, grace_s)
            case hosts.ProbeRequest(host=host):
                if host == host_id():
                    task = asyncio.create_task(self._probe(message))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
            case GroupEnded():
                self._halt_and_finish(message, self._launch.settings.termination_grace_s)
            case hosts.HostHeartbeat():
                pass

    def _report(self, event: RankEnded | CheckPassed | CheckFailed) -> None:
        match event:
            case CheckPassed():  # a group's checks run at the same time, so that of host 0 stands for all
                pass
            case RankEnded(rank, attempt, status, cause):
                self._send(hosts.HostRankEnded(rank, attempt, status, cause))
            case CheckFailed(_, reason):
                self._send(hosts.HostCheckFailed(reason))

    async def _probe(self, asked: hosts.ProbeRequest) -> None:
        assert self._local is not None
        request = WatchHello(asked.rank, "", asked.pid, asked.host, asked.started, offer=asked.offer)
        self._send(hosts.ProbeResult(asked.number, await self._local.probe(request)))

    def _send(self, message: hosts.FromHost) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _send_heartbeat(self, stream: HostStream) -> None:
        if self._stream is stream:
            assert self._local is not None
            stream.send(hosts.HostHeartbeat(self._local.keepers.newest_states()))
            self._loop.call_later(HEARTBEAT_S, self._send_heartbeat, stream)

    def _check_silence(self, stream: HostStream) -> None:
        """Cancel the stream if host 0 has been silent for SILENCE_S."""
        if self._stream is stream and self._loop.time() >= self._heard_at + SILENCE_S:
            stream.cancel(Unreachable(f"it was silent for {SILENCE_S:g} s"))
