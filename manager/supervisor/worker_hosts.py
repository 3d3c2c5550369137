"""Host 0's side of the further hosts of its group: one stream each, orders out, ends of ranks in."""

import asyncio
import itertools
import logging
from collections.abc import Callable

from lighthouse_protocol.messages import hosts
from lighthouse_protocol.messages.evidence import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_protocol.refusals import InvalidRequest, Superseded, Unreachable, WrongState
from lighthouse_protocol.wire.streams import NODE_REQUESTS, NODE_RESPONSES
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.loop import STOP_SIGNALS
from lighthouse_runtime.server.rpc_handler import Call, Stream
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender
from manager.evidence.process_probe import ELSEWHERE, LOOK_WITHIN_S
from manager.supervisor.rules.events import CheckFailed, Event, HostLost, HostReady, RankEnded
from manager.supervisor.rules.plan import LaunchPlan

log = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 10.0
_SEEN_WITHIN_S = LOOK_WITHIN_S + 0.5


class WorkerHosts:
    """`tell` hears of what the machine must know.

    `end` is called when such a supervisor got a signal: with 128 + its number, and the host.
    """

    def __init__(
        self, plan: Callable[[], LaunchPlan], tell: Callable[[Event], None], end: Callable[[int, int], None]
    ) -> None:
        self._plan = plan
        self._tell = tell
        self._end = end
        self._senders: dict[int, Sender] = {}
        self._heard_at: dict[int, float] = {}
        self._over: hosts.GroupEnded | None = None
        self._numbers = itertools.count(1)
        self._looks: dict[int, asyncio.Future[ProcessSnapshot]] = {}

    def entry(self) -> Stream:
        """What the manager's server serves."""
        return Stream(NODE_REQUESTS, self.serve)

    def send(self, host: int, message: hosts.ToHost) -> None:
        """To one that is not there, nothing: its loss is known."""
        if (sender := self._senders.get(host)) is not None:
            sender.send(NODE_RESPONSES.write(message))

    async def look(self, request: WatchHello) -> ProcessSnapshot:
        """At a rank's process on its own host, by the supervisor there, whichever that is."""
        if not self._senders:
            return ProcessSnapshot(missing=(ELSEWHERE,))
        number = next(self._numbers)
        seen = self._looks[number] = asyncio.get_running_loop().create_future()
        offer = request.offer or EvidenceOffer()
        message = hosts.ProbeRequest(number, request.group_rank, request.pid, request.host, request.started, offer)
        try:
            for host in self._senders:
                self.send(host, message)
            return await asyncio.wait_for(seen, _SEEN_WITHIN_S)
        except TimeoutError:
            late = f"no supervisor of its host has answered within {_SEEN_WITHIN_S:g} s"
            return ProcessSnapshot(missing=(f"process: {late}", f"output: {late}"))
        finally:
            del self._looks[number]

    def end_all(self, over: hosts.GroupEnded, excluded: dict[int, str]) -> None:
        self._over = over
        for host in self._senders:
            self.send(host, hosts.GroupEnded(over.status, over.why, excluded.get(host, "")))

    async def serve(self, requests: Requests[hosts.FromHost], _: Call, sender: Sender) -> None:
        entry = await requests.hello(hosts.HostHello, FIRST_WITHIN_S)
        if entry is None:
            return
        self._check(entry)
        host = entry.node_rank
        self._enter(host, sender)
        watch = asyncio.create_task(self._keep(host, sender))
        try:
            async for message in requests:
                self._heard_at[host] = asyncio.get_running_loop().time()
                if message is not None:
                    self.receive(host, message)
        finally:
            watch.cancel()
            self._leave(host, sender)

    def _check(self, entry: hosts.HostHello) -> None:
        plan = self._plan()
        ours = (plan.replica_id, plan.run, plan.layout.hosts, plan.layout.nproc)
        its = (entry.replica_id, entry.run, entry.nnodes, entry.nproc)
        if its != ours:
            raise WrongState(
                f"host {entry.node_rank} was started for (replica id, run, nnodes, nproc) {its}, "
                f"and host 0 for {ours}; give all hosts of a group the same options"
            )

    def _enter(self, host: int, sender: Sender) -> None:
        if (older := self._senders.pop(host, None)) is not None:
            older.end(Superseded(f"another supervisor of host {host} has come"))
            self._tell(HostLost(host, "its supervisor was started again"))
        log.info("host %d connected", host, extra=event("host_joined", host=host))
        self._senders[host] = sender
        self._heard_at[host] = asyncio.get_running_loop().time()
        address, port = self._plan().master
        self.send(host, hosts.HostWelcome(address, port))
        if self._over is not None:
            self.send(host, self._over)
        self._tell(HostReady(host))

    def _leave(self, host: int, sender: Sender) -> None:
        if self._senders.get(host) is sender:
            del self._senders[host]
            log.warning("lost host %d", host, extra=event("host_lost", host=host))
            self._tell(HostLost(host, "its supervisor disconnected"))

    async def _keep(self, host: int, sender: Sender) -> None:
        while asyncio.get_running_loop().time() < self._heard_at[host] + SILENCE_S:
            sender.send(NODE_RESPONSES.write(hosts.HostHeartbeat()))
            await asyncio.sleep(BEAT_S)
        sender.end(Unreachable(f"host {host} was silent for {SILENCE_S:g} s"))  # it may come back

    def receive(self, host: int, message: hosts.FromHost) -> None:
        match message:
            case hosts.HostRankEnded(rank, attempt, status, cause):
                if self._plan().layout.host_of(rank) != host:
                    raise InvalidRequest(f"{rank} is none of host {host}", field="rank")
                self._tell(RankEnded(rank, attempt, status, cause))
            case hosts.HostCheckFailed(reason):
                self._tell(CheckFailed(host, reason))
            case hosts.HostEndAsked(status):
                if status - 128 not in STOP_SIGNALS:
                    raise InvalidRequest(
                        f"{status} is not the status of a stop signal (143, 130, 129, 131)", field="status"
                    )
                self._end(status, host)
            case hosts.ProbeResult(number, outside):
                if (look := self._looks.get(number)) is not None and not look.done():
                    look.set_result(outside)
            case hosts.HostHeartbeat():
                pass
            case hosts.HostHello():
                raise InvalidRequest("came twice", field="hello")
