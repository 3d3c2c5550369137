"""Supervisor on a group's host 0 under `lighthouse-manager run`.

`HeadHost` runs the group's manager, its store, the supervision of the whole group, and the ranks on host 0.
`SupervisedStore` runs the TCPStore in a child of the guard process. The store listens on a port that is known in
advance, and outlives all ranks. `WorkerHosts` manages the connections to the group's other hosts: it sends them orders
to start and stop ranks, and receives their reports of exits. worker_host.py is the other side of these connections.
"""

import asyncio
import itertools
import logging
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import STORE_PORT_OFFSET
from lighthouse_protocol.messages import hosts
from lighthouse_protocol.messages.hosts import GroupEnded, HaltRanks, StartRanks
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.preemption import PreemptionNoted, PreemptionNotice, PreemptionReport
from lighthouse_protocol.messages.run import SupervisorHeartbeat
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_protocol.refusals import InvalidRequest, Superseded, Unreachable, WrongState
from lighthouse_protocol.wire.streams import NODE_REQUESTS, NODE_RESPONSES
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import is_port_taken, resolves_to_loopback, split_bind
from lighthouse_runtime.process.children import describe_listener
from lighthouse_runtime.process.loop import STOP_SIGNALS, start_part
from lighthouse_runtime.server.grpc_server import Call, Entry, Stream
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender
from manager.evidence import ELSEWHERE, PROBE_TIMEOUT_S, probe_alone
from manager.group.events import GroupGivenUp, Killed, RankGivenUp
from manager.guard.client import Command, Ended, GuardClient, format_output
from manager.preemption.watch import PreemptionWatch
from manager.server.daemon import ManagerDaemon
from manager.store.process import SCRIPT, check_torch
from manager.supervisor.driver import SupervisorDriver
from manager.supervisor.lighthouse_link import SupervisorLink
from manager.supervisor.local_host import HostSupervisor, Launch, LocalHost
from manager.supervisor.rules import events
from manager.supervisor.rules.events import CheckFailed, HostLost, HostReady, RankEnded
from manager.supervisor.rules.machine import SupervisorMachine
from manager.supervisor.rules.plan import LaunchPlan
from manager.supervisor.rules.restart_policy import GROUP_SCOPE, describe_status

log = logging.getLogger(__name__)


HEARTBEAT_S = 1.0
SILENCE_S = 10.0
_PROBE_TIMEOUT_S = PROBE_TIMEOUT_S + 0.5


@dataclass(slots=True)
class _Host:
    """Connection from host 0 to the supervisor on another host of the group."""

    sender: Sender
    heard_at: float  # when its last message arrived
    kept: tuple[hosts.KeptState, ...] = ()  # states that its ranks keep in memory


class WorkerHosts:
    """Connections from host 0 to the supervisors on the group's other hosts."""

    def __init__(self, head: "HeadHost") -> None:
        self._head = head
        self._hosts: dict[int, _Host] = {}
        self._over: hosts.GroupEnded | None = None
        self._numbers = itertools.count(1)
        self._probes: dict[int, asyncio.Future[ProcessSnapshot]] = {}

    def send(self, host: int, message: hosts.ToHost) -> None:
        """Send a message to a host, or drop it if the host is not connected. `serve` reports lost hosts."""
        if (connected := self._hosts.get(host)) is not None:
            connected.sender.send(NODE_RESPONSES.write(message))

    def kept_states(self) -> tuple[hosts.KeptState, ...]:
        return tuple(each for connected in self._hosts.values() for each in connected.kept)

    async def probe(self, request: WatchHello) -> ProcessSnapshot:
        """Ask all other hosts to inspect a rank's process. Return the answer of the host that runs it."""
        if not self._hosts:
            return ProcessSnapshot(missing=(ELSEWHERE,))
        number = next(self._numbers)
        seen = self._probes[number] = asyncio.get_running_loop().create_future()
        offer = request.offer or EvidenceOffer()
        message = hosts.ProbeRequest(number, request.group_rank, request.pid, request.host, request.started, offer)
        try:
            for host in self._hosts:
                self.send(host, message)
            return await asyncio.wait_for(seen, _PROBE_TIMEOUT_S)
        except TimeoutError:
            late = f"no supervisor of its host has answered within {_PROBE_TIMEOUT_S:g} s"
            return ProcessSnapshot(missing=(f"process: {late}", f"output: {late}"))
        finally:
            del self._probes[number]

    def end_all(self, over: hosts.GroupEnded, excluded: dict[int, str]) -> None:
        self._over = over
        for host in self._hosts:
            self.send(host, hosts.GroupEnded(over.status, over.why, excluded.get(host, "")))

    async def serve(self, requests: Requests[hosts.FromHost], _: Call, sender: Sender) -> None:
        entry = await requests.read_hello(hosts.HostHello, FIRST_WITHIN_S)
        if entry is None:
            return
        self._check_hello(entry)
        host = entry.node_rank
        connected = self._enter(host, sender)
        heartbeats = asyncio.create_task(_send_heartbeats(host, connected))
        try:
            async for message in requests:
                connected.heard_at = asyncio.get_running_loop().time()
                if message is not None:
                    self.receive(host, message)
        finally:
            heartbeats.cancel()
            if self._hosts.get(host) is connected:
                log.warning("lost host %d", host, extra=event("host_lost", host=host))
                self._lose(host, "its supervisor disconnected")

    def _check_hello(self, entry: hosts.HostHello) -> None:
        plan = self._head.plan
        ours = (plan.replica_id, plan.run, plan.layout.hosts, plan.layout.nproc, self._head.keep_every)
        its = (entry.replica_id, entry.run, entry.nnodes, entry.nproc, entry.keep_every)
        if its != ours:
            raise WrongState(
                f"host {entry.node_rank} was started for (replica id, run, nnodes, nproc, keep-every) {its}, "
                f"and host 0 for {ours}; give all hosts of a group the same options"
            )

    def _lose(self, host: int, why: str) -> None:
        del self._hosts[host]
        self._head.lose_notices(host)
        self._head.feed(HostLost(host, why))

    def _enter(self, host: int, sender: Sender) -> _Host:
        if (older := self._hosts.get(host)) is not None:
            older.sender.end(Superseded(f"another supervisor of host {host} has connected"))
            self._lose(host, "its supervisor was restarted")
        log.info("host %d connected", host, extra=event("host_joined", host=host))
        connected = self._hosts[host] = _Host(sender, asyncio.get_running_loop().time())
        address, port = self._head.plan.master
        self.send(host, hosts.HostWelcome(address, port))
        if self._over is not None:
            self.send(host, self._over)
        self._head.feed(HostReady(host))
        return connected

    def receive(self, host: int, message: hosts.FromHost) -> None:
        match message:
            case hosts.HostRankEnded(rank, attempt, status, cause):
                if self._head.plan.layout.host_of(rank) != host:
                    raise InvalidRequest(f"rank {rank} does not run on host {host}", field="rank")
                self._head.feed(RankEnded(rank, attempt, status, cause))
            case hosts.HostCheckFailed(reason):
                self._head.feed(CheckFailed(host, reason))
            case hosts.HostEndAsked(status):
                if status - 128 not in STOP_SIGNALS:
                    raise InvalidRequest(
                        f"{status} is not the status of a stop signal (143, 130, 129, 131)", field="status"
                    )
                self._head.handle_signal(status, host)
            case PreemptionReport(notice):
                self._head.handle_notice("", notice, host)
            case hosts.ProbeResult(number, outside):
                if (probe := self._probes.get(number)) is not None and not probe.done():
                    probe.set_result(outside)
            case hosts.HostHeartbeat(kept):
                if (connected := self._hosts.get(host)) is not None:
                    connected.kept = kept
            case hosts.HostHello():
                raise InvalidRequest("was sent twice", field="hello")


async def _send_heartbeats(host: int, connected: _Host) -> None:
    while asyncio.get_running_loop().time() < connected.heard_at + SILENCE_S:
        connected.sender.send(NODE_RESPONSES.write(hosts.HostHeartbeat()))
        await asyncio.sleep(HEARTBEAT_S)
    connected.sender.end(Unreachable(f"host {host} was silent for {SILENCE_S:g} s"))  # it may reconnect


FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
QUIET_S = 60.0  # if the store lives for this time, the restart delay is reset


class SupervisedStore:
    """Runs a group's TCPStore, and restarts it if it dies. Calls `fail` with the reason if it cannot start at all.

    If `host` is empty, the store listens on all addresses. `label` is its name in logs.
    """

    def __init__(
        self, guard: GuardClient, python: str, port: int, host: str, label: str, fail: Callable[[str], None]
    ) -> None:
        self._guard = guard
        self._command = Command((python, str(SCRIPT), str(port), host), {}, label, is_shown=False, has_input=True)
        self._port = port
        self._fail = fail
        self._delay_s = FIRST_DELAY_S
        self._started_at = 0.0
        self._has_served = False
        self._is_over = False

    def start(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._guard.start(self._command, self._handle_end)

    def stop(self) -> None:
        """Disable restarts. The store itself exits with the guard, the process that has started it."""
        self._is_over = True

    def _handle_end(self, ended: Ended) -> None:
        if self._is_over:
            return
        self._has_served |= any(line.startswith("store ") for line in ended.output)
        status = describe_status(ended.status)
        if ended.status > 0 and not self._has_served:
            self._fail(f"the group's store does not start ({status}){format_output(ended.output)}")
            return
        loop = asyncio.get_running_loop()
        if loop.time() > self._started_at + QUIET_S:
            self._delay_s = FIRST_DELAY_S
        log.error("the group's store died (%s); restarting it on port %d for the next quorum",
                  status, self._port, extra=event("store_restarts", port=self._port))  # fmt: skip
        loop.call_later(self._delay_s, self._start_again)
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)

    def _start_again(self) -> None:
        if not self._is_over:
            self.start()


_PORT_STEP = 100  # distance from this group's ports to the free ports that an error message suggests


def check_ports(launch: Launch) -> None:
    """Raise InvalidRequest if the port of the manager or of the group's store is taken, or if both have the same.

    The message names the processes that use these ports, and options with which the group can start.
    """
    settings, torchrun = launch.settings, launch.torchrun
    (host, port), store_port = split_bind(launch.config.bind, "--bind"), settings.chosen_store_port
    if launch.serves_store and port == store_port:
        raise InvalidRequest(
            f"the manager and the group's store would both listen on {port}; the store's port is --store-port, by "
            f"default --master-port + {STORE_PORT_OFFSET}. Give another --bind",
            field="--bind",
        )
    needed = {"manager": (host, port)} | ({"group's store": ("::", store_port)} if launch.serves_store else {})
    taken = {who: number for who, (where, number) in needed.items() if is_port_taken(where, number)}
    if not taken:
        return
    ports = (port, settings.master_port, store_port)
    shifts = range(_PORT_STEP, 65536 - max(ports), _PORT_STEP)
    shift = next((s for s in shifts if not any(is_port_taken("::", number + s) for number in ports)), -_PORT_STEP)
    has_fixed_master = settings.store_port is not None or (torchrun is not None and bool(torchrun.master_port))
    options = {
        "manager": ("--bind", str(Address(host, port + shift))),
        "group's store": ("--store-port", str(store_port + shift))
        if has_fixed_master
        else ("--master-port", str(settings.master_port + shift)),
    }
    whys = "; ".join(
        f"the {who} cannot listen on {each}, which is in use by {describe_listener(each)}"
        for who, each in taken.items()
    )
    raise InvalidRequest(
        f"{whys}. Replica groups on one host need different ports; start this one with "
        + " ".join(word for who in taken for word in options[who]),
        field=", ".join(options[who][0] for who in taken),
    )


LOOPBACK = "127.0.0.1"
_QUICK_LEAVE_S = 1.0


class HeadHost(HostSupervisor):
    """Supervisor on host 0, which also runs the manager, the store and the supervision of the whole group."""

    def __init__(self, launch: Launch, guard: GuardClient) -> None:
        super().__init__(launch, guard)
        settings = launch.settings
        machine = SupervisorMachine(
            settings.layout,
            settings.policy,
            random.random,
            grace_s=settings.termination_grace_s,
            host_timeout_s=settings.node_timeout_s,
        )
        self._driver = SupervisorDriver(machine, self._loop, self)
        self.feed, self.receive = self._driver.feed, self._driver.receive
        self._workers = WorkerHosts(self)
        self._daemon: ManagerDaemon | None = None
        self._preemption: PreemptionWatch | None = None
        self._store: SupervisedStore | None = None
        self._link: SupervisorLink | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._excluded: dict[int, str] = {}

    def _state(self) -> str:
        group = self._daemon.state() if self._daemon is not None else "starting"
        return f"{group}; {len(self._driver.machine.running)} ranks run"

    async def _begin(self) -> None:
        config, settings = self._launch.config, self._launch.settings
        check_ports(self._launch)
        if self._launch.serves_store:
            check_torch(config.store_python)
            self._store = SupervisedStore(
                self._guard,
                config.store_python,
                settings.chosen_store_port,
                # Listen on all addresses if peers on other hosts connect. The group's own ranks use loopback.
                LOOPBACK if resolves_to_loopback(config.advertised_host()) and settings.master_addr is None else "",
                f"{config.replica_id}/store",
                lambda why: self.feed(events.EndAsked(1, why)),
            )
        daemon = ManagerDaemon(
            self._launch.manager_config(),
            self._launch.group_secret,
            self._handle_manager_exit,
            self,
            self._launch.run_secret,
        )
        self._preemption = PreemptionWatch(daemon.group, self._loop)
        await daemon.start()
        self._daemon = daemon
        if self._store is not None:
            self._store.start()
            if (torchrun := self._launch.torchrun) is not None and torchrun.master_port == 0:
                log.info("torchrun chooses MASTER_PORT itself (--standalone, --rdzv-backend): the store is on port %d "
                         "(LIGHTHOUSE_STORE_PORT) instead of MASTER_PORT + 2",
                         settings.chosen_store_port, extra=event("store_port"))  # fmt: skip
        own = parse_address(daemon.address, "address").host if settings.nnodes > 1 else LOOPBACK
        plan = self._launch.plan(daemon.address, (settings.master_addr or own, settings.master_port))
        self._link = self._launch.run_link(plan, self)
        self._local = LocalHost(plan, self._guard, settings, self._link, self.feed)
        self._link.open()

    def heartbeat(self, now: float) -> SupervisorHeartbeat:
        running = 0 if self._local is None else len(self._local.running)
        return replace(self._driver.machine.heartbeat(now), running=running)

    @property
    def keep_every(self) -> int:
        return self._launch.settings.keep_every

    # -- Supervisor, for the manager

    def kept_states(self) -> tuple[hosts.KeptState, ...]:
        own = self._local.keepers.newest_states() if self._local is not None else ()
        return (*own, *self._workers.kept_states())

    def entries(self) -> Mapping[str, Entry]:
        return {"Node": Stream(NODE_REQUESTS, self._workers.serve)}

    def handle_notice(self, source: str, notice: PreemptionNotice | None, host: int = 0) -> None:
        if self._preemption is not None:
            self._preemption.set_notice(host, source, notice)

    def lose_notices(self, host: int) -> None:
        if self._preemption is not None:
            self._preemption.lose_host(host)

    def handle(self, outcome: RankGivenUp | GroupGivenUp | Killed | PreemptionNoted) -> None:
        match outcome:
            case PreemptionNoted(others):
                if self._preemption is not None:
                    self._preemption.record_answer(others)
            case GroupGivenUp(reason):
                self.feed(events.MisfitReported(reason))
            case RankGivenUp(rank, reason):
                # torchrun handles the loss of its ranks itself.
                if self._local is not None and self._local.plan.torchrun is None and not outcome.is_expected:
                    self.feed(events.RankSilent(rank, reason))
            case Killed(reason, behind) if not behind:
                self.feed(events.KillAsked(reason))
            case Killed(reason, behind):  # only a kill that stalled ranks caused counts as a loss
                for rank in sorted(behind) if self._local is not None else ():
                    why = f"rank {rank} is behind ({reason})"
                    self.feed(events.RankSilent(self.plan.process_of(rank), why))

    async def probe(self, request: WatchHello, is_here: bool) -> ProcessSnapshot:
        if not is_here:
            return await self._workers.probe(request)
        return await self._local.probe(request) if self._local is not None else await probe_alone(request, is_here)

    def send_signal(self, rank: int | None, number: int, *, is_largest: bool = False) -> None:
        if self._local is None:
            raise Unreachable("host 0 is starting; retry")
        self._local.send_signal(rank, number, is_largest=is_largest)

    @property
    def plan(self) -> LaunchPlan:
        """The launch plan. Raise Unreachable while it is not known yet."""
        if self._local is None:
            raise Unreachable("host 0 is starting; retry")
        return self._local.plan

    async def _end(self, over: GroupEnded) -> None:
        if self._leaving is not None:
            await asyncio.wait((self._leaving,), timeout=_QUICK_LEAVE_S)
            self._leaving.cancel()
        elif (over.status == 0 or self._is_preempted) and self._daemon is not None:
            await self._daemon.leave(over.why)
        if self._store is not None:
            self._store.stop()
        self._workers.end_all(over, self._excluded)
        if self._link is not None:
            await self._link.close()

    async def _close(self) -> None:
        self._driver.close()
        if self._preemption is not None:
            self._preemption.close()
        if self._daemon is not None:
            await self._daemon.stop()

    def handle_signal(self, status: int, host: int = 0) -> None:
        """Handle a stop signal to the supervisor on `host`. `status` is 128 plus the signal's number.

        After the first signal, the group completes its step and leaves. After the second, its ranks receive SIGTERM.
        After the third, they are killed. Several hosts may receive the same signal, so signals are counted per host.
        """
        self._signals[host] += 1
        why = f"{signal.Signals(status - 128).name} to the supervisor"
        if self._leaving is None:
            self.feed(events.EndAsked(status, why, is_leaving=True))
            self._leaving = start_part(self._leave_job(events.EndAsked(status, why)), "leaving", self.fail)
        elif self._signals[host] > 1:
            self._leaving.cancel()
            self.feed(events.EndAsked(status, why, is_urgent=True))

    async def _leave_job(self, then: events.EndAsked) -> None:
        if self._daemon is not None and not self._driver.machine.is_over:
            await self._daemon.leave(then.why)
        while (left_s := self._save_left_s) > 0 and not self._over.done():
            await asyncio.wait((self._over,), timeout=left_s)
        self.feed(replace(then, grace_s=self._exit_left_s))

    @property
    def _is_preempted(self) -> bool:
        return self._preemption is not None and self._preemption.is_draining

    @property
    def _save_left_s(self) -> float:
        if self._preemption is None or self._daemon is None or not self._daemon.group.has_ranks:
            return 0.0
        return self._preemption.save_left_s

    @property
    def _exit_left_s(self) -> float:
        return self._preemption.exit_left_s if self._preemption is not None else 0.0

    def _handle_manager_exit(self, status: int) -> None:
        """Handle the manager's exit. After a drain (`status` 0), first let the ranks save a checkpoint if it is due."""
        left_s = self._save_left_s if status == 0 else 0.0
        if left_s > 0:
            self._loop.call_later(left_s, self._handle_manager_exit, status)
        self._driver.handle_manager_exit(status, self._exit_left_s, is_saving=left_s > 0)

    # -- Group, for the driver

    def start(self, host: int, ranks: Sequence[int], attempt: int) -> None:
        first = 0 if self._launch.settings.policy.scope == GROUP_SCOPE else ranks[0]
        unit = f"{self._launch.incarnation}-{first}-{attempt}"
        if host == 0 and self._local is not None:
            self._local.start(ranks, attempt, unit)
        else:
            self._workers.send(host, StartRanks(tuple(ranks), attempt, unit))
        if self._daemon is not None:
            # A torchrun process contains all ranks on its host.
            self._daemon.group.ranks_started(ranks if self._launch.torchrun is None else None)

    def halt(self, host: int, ranks: Sequence[int], grace_s: float) -> None:
        if host == 0 and self._local is not None:
            self._local.halt(ranks, grace_s)
        else:
            self._workers.send(host, HaltRanks(tuple(ranks), grace_s))

    def ask_stop(self, reason: str) -> None:
        if self._link is not None:
            self._link.ask_stop(f"{self._launch.config.replica_id}: {reason}")

    def exclude(self, host: int, reason: str) -> None:
        self._excluded[host] = reason
        if host == 0 and self._link is not None:
            self._link.exclude(reason)

    def finish(self, over: events.SupervisionEnded) -> None:
        # A scheduler must start a preempted group again, so do not report success.
        if over.status == 0 and self._is_preempted:
            over = replace(over, status=128 + signal.SIGTERM, why=f"preempted; {over.why}")
        self._finish(GroupEnded(over.status, over.why))
