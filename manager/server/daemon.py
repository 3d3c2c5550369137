"""The manager daemon of one replica group.

`ManagerDaemon` connects the components: the group's driver, the link to the lighthouse, the RPC service, the group's
store and the evidence collector. `serve` runs it in a separate process until a signal, a drain or a kill. Under a
supervisor, it runs inside the supervisor's process. This module also renders the manager's metrics.
"""

import asyncio
import dataclasses
import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lighthouse_protocol import VERSION
from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.identity import Address, parse_address
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.hosts import KeptState
from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.membership import Participant
from lighthouse_protocol.messages.preemption import PreemptionNoted, PreemptionNotice
from lighthouse_protocol.messages.session import HoldState, WatchHello
from lighthouse_protocol.messages.status import ManagerStatus
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import short_name
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import grpc_bind, listening_host, resolves_to_loopback, split_bind
from lighthouse_runtime.process.loop import ServiceManager, StopRequest, announce, start_part
from lighthouse_runtime.security.access import LocalOperatorAccess
from lighthouse_runtime.server.grpc_server import Entry, GrpcServer
from lighthouse_runtime.timing.pacing import SuspensionTimers
from lighthouse_runtime.timing.timers import LoopLag
from lighthouse_runtime.web.control import JSON_HEADERS, HttpGuard, read_body, refused
from lighthouse_runtime.web.server import HttpServer, HttpSide
from manager.evidence import EvidenceCollector, probe_alone
from manager.group.driver import GroupDriver, Outcome
from manager.group.events import GroupGivenUp, GroupLeft, Killed, RankGivenUp
from manager.group.link import LighthouseLink
from manager.preemption.sources import read_posted
from manager.server.chaos import FaultInjector, Ranks
from manager.server.config import ManagerConfig
from manager.server.service import REFLECTED, GroupAccess, ManagerService, encode_handles
from manager.store.process import StoreProcess

log = logging.getLogger(__name__)


_GAUGES: dict[str, tuple[str, Callable[[ManagerStatus], float]]] = {
    "uptime_seconds": ("Time since the manager started.", lambda s: s.uptime_s),
    "lighthouse_reachable": ("1 while the lighthouse answers.", lambda s: float(s.lighthouse_reachable)),
    "quorum_id": ("Id of the last quorum that the ranks received.", lambda s: float(s.quorum_id)),
    "step": ("Newest step that the ranks requested or were granted.", lambda s: float(s.step)),
    "ranks_waiting": ("Ranks that are waiting for a quorum.", lambda s: float(len(s.ranks_waiting))),
    "kept_step": ("Newest step that all ranks keep in memory; 0 if there is none.", lambda s: float(s.kept_step)),
}
_COUNTERS: dict[str, tuple[str, Callable[[ManagerStatus], float]]] = {
    "commits": ("Steps committed.", lambda s: float(s.commits)),
    "discards": ("Steps discarded.", lambda s: float(s.discards)),
    "grants": ("Steps that the ranks began without asking the lighthouse.", lambda s: float(s.grants)),
}
_MODES = (*(mode.value for mode in HoldState), "none")


class _Snapshot(Collector):
    def __init__(self, status: ManagerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(f"lighthouse_manager_{name}", text, value=read(self._status))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(f"lighthouse_manager_{name}", text, value=read(self._status))
        modes = GaugeMetricFamily(
            "lighthouse_manager_mode", "1 for the manager's mode, 0 for the other modes.", labels=["mode"]
        )
        for mode in _MODES:
            modes.add_metric([mode], self._status.mode == mode)
        yield modes


def render(status: ManagerStatus) -> tuple[bytes, str]:
    """Return the body and the content type of the metrics page."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(status))
    return generate_latest(registry), CONTENT_TYPE_LATEST


MISCONFIGURED = 2
# A --drain-timeout below this means that no wait is wanted, so its expiry is not logged.
NOT_WAITED_S = 0.01


class Supervisor(Ranks, Protocol):
    def entries(self) -> Mapping[str, Entry]:
        """Return the supervisor's own RPCs, by method name, which the manager serves on its port."""
        ...

    async def probe(self, request: WatchHello, is_here: bool) -> ProcessSnapshot:
        """Inspect a rank's process, even if it does not answer. `is_here` means that it runs on this host."""
        ...

    def handle(self, outcome: RankGivenUp | GroupGivenUp | Killed | PreemptionNoted) -> None: ...

    def kept_states(self) -> tuple[KeptState, ...]:
        """Return the step and size of the state that each rank in the group keeps in its supervisor's memory."""
        ...

    def handle_notice(self, source: str, notice: PreemptionNotice | None) -> None:
        """Handle a preemption notice from an HTTP request. `notice` is None if the source withdraws its notice."""
        ...


class ManagerDaemon:
    """Manager of one replica group. `address` is the advertised address once `start` has returned."""

    def __init__(
        self,
        config: ManagerConfig,
        secret: str,
        end: Callable[[int], None],
        supervisor: Supervisor | None = None,
        session_secret: str = "",
    ) -> None:
        """Create the manager. It does nothing until `start` is called.

        Args:
            config: The options.
            secret: The group's secret, or an empty string (see GroupAccess in service.py).
            end: Called with the exit status: 0 after the group has left, 1 after a kill or a store failure, or
                MISCONFIGURED.
            supervisor: The supervisor in whose process this manager runs, or None if another program starts the ranks.
                With a supervisor, a kill is passed to it instead of to `end`.
            session_secret: Secret by which the lighthouse recognizes this process. If empty, a random one is used.
        """
        self._config = config
        self._secret = secret
        self._end = end
        self._supervisor = supervisor
        self._started_at = time.monotonic()
        self._host = config.advertised_host()
        self._store: StoreProcess | None = None
        self._store_address = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._left = asyncio.Event()
        self._search = LeaderSearch(config.coordinator.addresses)
        self._link = LighthouseLink(self._client, self._search)
        timers = SuspensionTimers(asyncio.get_running_loop())
        self._faults = FaultInjector(
            config.replica_id, self._link, supervisor, asyncio.get_running_loop(), is_allowed=config.allow_chaos
        )
        self._lag = LoopLag(timers, "no rank counts as lost or stalled for that time")
        self._driver = GroupDriver(
            Participant(config.replica_id, group_world_size=config.group_world_size, continues=config.continue_),
            secrets.token_hex(6),
            timers,
            self._faults,
            EvidenceCollector(
                config.group_world_size, self._faults.send, supervisor.probe if supervisor is not None else probe_alone
            ),
            self._handle,
            secret=session_secret or secrets.token_hex(SECRET_BYTES),
            encode_handles=encode_handles,
            rank_timeout_s=config.rank_timeout_s,
            limits=Limits(floor_s=config.stall_timeout_s),
            lag=self._lag,
        )
        self.address = ""

    @property
    def group(self) -> GroupDriver:
        return self._driver

    async def start(self) -> None:
        """Start the store and the RPC server. Raise InvalidRequest if an option cannot be used."""
        config = self._config
        self._store_address = config.store
        if config.store == "auto":
            self._store = await StoreProcess.start(config.store_python, listening_host(self._host))
            self._tasks.append(start_part(self._watch_store(self._store), "the watch of the store", self._end))
            self._store_address = str(Address(self._host, self._store.port))
        # Start gRPC only now: it does not survive the fork that starts the store.
        more = self._supervisor.entries() if self._supervisor is not None else {}
        service = ManagerService(self._driver, self.status, more=more)
        self._grpc = GrpcServer(service.services(), REFLECTED, GroupAccess(self._secret))
        self.address = str(Address(self._host, await self._grpc.start(grpc_bind(config.bind))))
        store_host = parse_address(self._store_address, "--store").host
        self._driver.describe(
            dataclasses.replace(
                self._driver.me,
                address=f"http://{self.address}",
                store_address=self._store_address,
                # Only this host can resolve its own names.
                resolves_to_loopback=any(map(resolves_to_loopback, {self._host, store_host})),
            )
        )
        self._lag.watch()
        if config.http is not None:
            await self._start_http(config.http)
        self._tasks.append(start_part(self._run(), "the link to the lighthouse", self._end))
        self._log_start()

    async def _run(self) -> None:
        driver = self._driver
        try:
            await self._link.run(*self._faults.between(driver))
        except LighthouseError as e:
            log.error(
                "cannot use the lighthouse: %s; fix LIGHTHOUSE_ADDRESS or --lighthouse", e, extra=event("no_lighthouse")
            )
            self._end(MISCONFIGURED)

    def _client(self) -> AsyncLighthouseClient:
        coordinator = self._config.coordinator.at(self._search.address)
        return AsyncLighthouseClient(coordinator, job=self._config.job)

    async def leave(self, reason: str) -> None:
        """Leave the job after the steps that the ranks may already have begun. Wait for up to --drain-timeout."""
        self._driver.drain(reason)
        timeout_s = self._config.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        except TimeoutError:
            if timeout_s >= NOT_WAITED_S:  # torchft's managers exit with their rank, so no step is unfinished
                log.warning(
                    "the ranks did not finish their step within --drain-timeout (%g s); leaving anyway",
                    timeout_s,
                    extra=event("drain_timeout"),
                )

    def _handle(self, outcome: Outcome) -> None:
        match outcome:
            case GroupLeft():
                self._left.set()
                self._end(0)
            case Killed() if self._supervisor is None:
                self._end(1)
            case _ if self._supervisor is not None:
                self._supervisor.handle(outcome)
            case _:
                pass

    async def stop(self) -> None:
        """Refuse the waiting calls, then stop the heartbeats, all connections and the store."""
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        self._driver.close(f"the manager of {self._config.replica_id} is shutting down")
        self._lag.stop()
        self._faults.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._grpc is not None:
            await self._grpc.stop(self._config.shutdown_timeout_s)
        if self._http is not None:
            await self._http.stop()
        if self._store is not None:
            await self._store.stop()
        log.info("manager stopped", extra=event("stopped"))

    def state(self) -> str:
        """Describe the group in one line, for systemd."""
        status = self.status()
        reached = "" if status.lighthouse_reachable else f"; no lighthouse: {status.lighthouse_error}"
        return f"{status.replica_id}: step {status.step} of quorum {status.quorum_id}{reached}"

    def status(self) -> ManagerStatus:
        group, link, config = self._driver.status(), self._link, self._config
        return ManagerStatus(
            version=VERSION,
            uptime_s=time.monotonic() - self._started_at,
            replica_id=config.replica_id,
            start=short_name(group.incarnation),
            job=config.job,
            group_world_size=config.group_world_size,
            address=self.address,
            store_address=self._store_address,
            lighthouse=link.address,
            lighthouse_reachable=link.is_reachable,
            lighthouse_error=link.error,
            quorum_id=group.quorum_id,
            step=group.step,
            phase=group.phase,
            ranks_waiting=group.waiting,
            commits=group.commits,
            discards=group.discards,
            mode=group.held.mode.value if group.held is not None else "none",
            grants=group.grants,
            kept=self._supervisor.kept_states() if self._supervisor is not None else (),
        )

    async def _watch_store(self, store: StoreProcess) -> None:
        """Stop the manager when the store's process exits, because the group cannot connect to its peers without it."""
        status = await store.wait()
        log.error(
            "the store process ended with status %d; the manager ends with it",
            status,
            extra=event("store_ended", status=status),
        )
        self._end(1)

    async def _start_http(self, bind: str) -> None:
        guard = HttpGuard(LocalOperatorAccess(), (self._host, split_bind(bind, "--http")[0]))
        hook = functools.partial(self._handle_preemption, guard)
        side = HttpSide(
            is_ready=lambda: self._link.is_reachable,
            metrics=lambda: render(self.status()),
            status=lambda: dataclasses.asdict(self.status()),
            guard=guard,
            hooks={} if self._supervisor is None else {"POST /preemption": hook},
        )
        self._http = HttpServer(side)
        port = await self._http.start(bind)
        log.info("serves HTTP on port %d", port, extra=event("serving_http", port=port))

    async def _handle_preemption(self, guard: HttpGuard, request: web.Request) -> web.Response:
        """Handle POST /preemption: check the request with `guard`, and pass the notice in it to the supervisor."""
        assert self._supervisor is not None
        try:
            guard.check_page(request)
            notice = read_posted(await read_body(request), time.time(), socket.gethostname())
        except LighthouseError as e:
            return refused(e)
        self._supervisor.handle_notice("http", notice)
        return web.json_response({"preempted": notice is not None}, headers=JSON_HEADERS)

    def _log_start(self) -> None:
        config = self._config
        log.info(
            "manager %s of %s (%d %s) serves on %s; store %s; lighthouse %s",
            VERSION,
            config.replica_id,
            config.group_world_size,
            "rank" if config.group_world_size == 1 else "ranks",
            self.address,
            self._store_address,
            config.coordinator,
            extra=event("serving", version=VERSION, address=self.address, store=self._store_address),
        )
        if resolves_to_loopback(self._host) and not config.coordinator.is_loopback:
            log.warning("%s is a loopback address: other hosts cannot reach it; set --bind [::]:PORT and --advertise",
                        self._host, extra=event("loopback_advertised", host=self._host))  # fmt: skip


async def serve(config: ManagerConfig, secret: str, announce_fd: int | None, stop: StopRequest) -> None:
    """Run the manager until a signal, a drain or a kill.

    Write its address to the file descriptor `announce_fd`, if given, once it serves.
    """
    daemon = ManagerDaemon(config, secret, stop)
    systemd = ServiceManager(asyncio.get_running_loop(), daemon.state)
    try:
        await daemon.start()
        announce(announce_fd, daemon.address)
        systemd.ready()
        await stop.wait()
        systemd.stopping()
        log.info("stopping", extra=event("stopping"))
        if stop.status == 0:
            await daemon.leave("its manager was asked to stop")
    finally:
        await daemon.stop()
        systemd.close()
