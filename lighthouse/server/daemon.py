"""The lighthouse daemon.

`serve` runs gRPC and HTTP servers on one event loop until a stop signal arrives. `LighthouseDaemon` connects the
components: the registries of jobs, runs and incidents, the store of their records, the listeners and the metrics. With
--store, the daemon also takes part in leader election: only the leader serves, and a follower refuses each call with an
error that names the leader's address.
"""

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from lighthouse import dashboard
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.incidents import OnStall
from lighthouse.job.ledger import EVERY_S as LEDGER_EVERY_S
from lighthouse.job.ledger import Ledger
from lighthouse.job.progress import EVERY_S as SAMPLED_EVERY_S
from lighthouse.job.registry import JobRegistry
from lighthouse.job.run_driver import Ports
from lighthouse.server.chaos import ChaosService
from lighthouse.server.config import LighthouseConfig
from lighthouse.server.listeners import ListenerSecurity
from lighthouse.server.metrics import Counters, Scrape, render
from lighthouse.server.page_acts import page_acts
from lighthouse.server.services import REFLECTED, IncidentService, LighthouseService, RunService
from lighthouse.server.webhook import PreemptionWebhook
from lighthouse.store.election import SharedStore
from lighthouse.store.incident_files import IncidentFiles
from lighthouse.store.ledger_files import LedgerFiles
from lighthouse.store.sqlite import Journal
from lighthouse_protocol import VERSION
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import SECRET_BYTES
from lighthouse_protocol.messages.incident import to_document
from lighthouse_protocol.messages.preemption import PreemptionNotice
from lighthouse_protocol.messages.status import LighthouseStatus, StoreKind, StoreStatus
from lighthouse_protocol.refusals import InvalidRequest, NotLeader
from lighthouse_protocol.rules.rate_limits import PeerLimits
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.address import grpc_bind, served_host, split_bind
from lighthouse_runtime.process.logs import recent_lines
from lighthouse_runtime.process.loop import ServiceManager, StopRequest, announce, start_part
from lighthouse_runtime.server.grpc_server import GrpcServer, Peers
from lighthouse_runtime.server.streams import OutputGate
from lighthouse_runtime.web.control import HttpControl, HttpGuard
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide, LeaderRedirect

log = logging.getLogger(__name__)

_STOPPING = "the lighthouse is shutting down; ask again, it or its successor will answer"
JOBS_NAMED = 4
RENEWED_EVERY_S = 5.0
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": dashboard.CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LighthouseDaemon:
    """The lighthouse daemon, with its gRPC and HTTP servers, registries and stores.

    `grpc_port` and `http_port` are the ports in use once start() has returned.
    """

    def __init__(self, config: LighthouseConfig, stop: Callable[[int], None]) -> None:
        self._config = config
        self._end = stop
        self._is_ready = False
        self._memory = config.memory()
        etcd = config.etcd_client()
        self._shared = None if etcd is None else SharedStore(etcd, config.store_ttl_s, self.lead, self.follow, stop)
        folder = config.incident_folder(self._memory)
        files = None if folder is None else IncidentFiles(folder)
        self._incidents = IncidentRegistry(OnStall(config.on_stall), files)
        self._counters = counters = Counters()
        self._webhook = None if config.on_preemption is None else PreemptionWebhook(config.on_preemption)
        self._jobs = JobRegistry(
            config.quorum_config(),
            Ports(
                asyncio.get_running_loop(),
                time.time,
                refused=counters.refused,
                draw_secret=lambda: secrets.token_hex(SECRET_BYTES),
                is_busy=_is_busy,
                preempted=self._preempted,
                stall_after_s=config.stall_timeout_s,
                slow_after_s=config.slow_after_s,
            ),
            self._memory if self._shared is None else self._shared.records,
            stop if self._shared is None else self._shared.give_up,
            self._incidents,
            rank_timeout_s=config.rank_timeout_s,
        )
        self._runs = self._jobs.runs
        peers, self._security = Peers(PeerLimits.for_open(config.max_open_per_peer)), ListenerSecurity(config)
        security = self._security
        chaos = ChaosService(self._jobs, is_allowed=config.allow_chaos)
        service = LighthouseService(
            self._jobs,
            counters,
            peers=peers,
            is_insecure=security.is_insecure,
            place=lambda: (self._store_status(), self.http_port),
        )
        shared = self._shared
        ledger = None if folder is None else LedgerFiles(folder)
        incidents = self._incident_service = IncidentService(self._jobs, self._incidents, ledger)
        runs = RunService(self._runs, security.audit, peers=peers)
        more = {**runs.methods(), **incidents.methods(), **chaos.methods()}
        gate = None if shared is None else shared.gate
        self._grpc = GrpcServer(
            service.services(more),
            REFLECTED,
            security.grpc.access,
            counters.called,
            peers,
            gate,
            keepalive_s=config.keepalive_s,
        )
        self._torchft = self._make_torchft_server(service, counters, peers, gate)
        guard = HttpGuard(security.http.access, (*_hosts(config), config.advertise or ""))
        self._http = HttpServer(
            HttpSide(
                is_ready=lambda: self._is_ready,
                metrics=lambda: render(self._scrape(service)),
                status=lambda: self._status(service),
                page=Document(dashboard.page(), "text/html", PAGE_HEADERS),
                guard=guard,
                control=HttpControl(guard, page_acts(service, runs, incidents, security.audit)),
                incident=lambda name, call: to_document(incidents.find(name, call)),
                log=recent_lines,
                redirect=self._leader_redirect,
            )
        )
        self._repeating: tuple[asyncio.Task[None], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self.grpc_port = 0
        self.http_port = 0

    def _scrape(self, service: LighthouseService) -> Scrape:
        jobs = list(self._jobs)
        return Scrape(
            status=service.status(),
            counters=self._counters,
            loop_late_s=self._jobs.lag.late_s,
            runs=self._runs.run_statuses(),
            accounts={driver.job: driver.account for driver in jobs},
            now=asyncio.get_running_loop().time(),
            phase_s={driver.job: driver.progress.known.phase_seconds for driver in jobs},
            slowness={driver.job: driver.progress.known.slow_ranks.list_slowness() for driver in jobs},
            incidents=self._incidents.times,
            candidate=None if self._shared is None else self._shared.status(),
        )

    def _preempted(self, job: str, replica_id: str, notice: PreemptionNotice) -> None:
        if self._webhook is not None:
            self._webhook.post(job, replica_id, notice)

    def _status(self, service: LighthouseService) -> dict[str, Any]:
        """Return the status document for the dashboard and for GET /status. Callers must not modify its values."""
        status = service.status(has_ranks=True)
        shown = {name: getattr(status, name) for name in LighthouseStatus.__slots__}
        pace = {driver.job: driver.current_pace() for driver in self._jobs}
        runs = (*status.runs, *self._runs.stopped_status())
        return {**shown, "runs": runs, "pace": pace, "grpc_port": self.grpc_port}

    def _store_status(self) -> StoreStatus:
        if self._shared is not None:
            status = self._shared.status()
            return (
                StoreStatus(StoreKind.ETCD, status.term, status.store_error) if status else StoreStatus(StoreKind.ETCD)
            )
        if isinstance(self._memory, Journal):
            return StoreStatus(StoreKind.JOURNAL, self._memory.term)
        return StoreStatus()

    async def start(self) -> None:
        """Claim the journal and start the servers.

        Raises:
            LighthouseError: If an address or the journal is in use or unusable.
        """
        try:
            await self._start()
        except BaseException:
            self._memory.release(is_unused=True)
            raise

    async def _start(self) -> None:
        if self._shared is None and self._memory.claim():
            self._jobs.load_records(self._memory.load())
        await asyncio.to_thread(self._incidents.load_stored)
        http, grpc = self._security.http.files, self._security.grpc.files
        self.http_port = await self._http.start(self._config.http, http and http.for_http())
        try:
            await self._start_grpc(grpc and grpc.for_grpc())
        except BaseException:
            await self._http.stop()
            raise
        self._is_ready = True
        self._repeating = (
            start_part(self._renew(), "the renewal of certificates", None),
            start_part(self._sample(), "the sampling of progress", None),
        )
        await self._greet()

    async def _start_grpc(self, credentials: grpc.ServerCredentials | None) -> None:
        if (port := split_bind(self._config.bind, "--bind")[1]) != 0:
            self._security.announce(port)  # before a client can connect
        self.grpc_port = await self._grpc.start(grpc_bind(self._config.bind), credentials)
        if port == 0:
            self._security.announce(self.grpc_port)
        if self._torchft is not None and self._config.torchft_listen is not None:
            try:
                port = await self._torchft.start(grpc_bind(self._config.torchft_listen))
            except InvalidRequest as e:
                raise InvalidRequest(str(e).partition(": ")[2], field="--torchft-listen") from None
            log.warning(
                "INSECURE: torchft clients are served without TLS on port %d: anyone who can reach it can join",
                port,
                extra=event("insecure", port=port),
            )

    async def _sample(self) -> None:
        """Periodically sample each job's progress for the dashboard, and write down how the groups spent their time."""
        written = time.time() // LEDGER_EVERY_S
        while True:
            await asyncio.sleep(SAMPLED_EVERY_S)
            if (interval := time.time() // LEDGER_EVERY_S) != written:
                written = interval
                await self._incident_service.write_ledger()
            self._jobs.take_samples()

    async def _greet(self) -> None:
        grpc, http = [await asyncio.to_thread(served_host, host) for host in _hosts(self._config)]
        address, page = Address(grpc, self.grpc_port), f"{self._scheme}://{Address(http, self.http_port)}/"
        journal = str(self._memory.path) if isinstance(self._memory, Journal) else "none"
        # Print the join string first: scripts wait for the "serving" line and then read the lines above it.
        await asyncio.to_thread(self._security.greet, self.grpc_port)
        log.info(
            "lighthouse %s serves gRPC on port %d, HTTP on port %d: managers reach it at %s, browsers at %s; "
            "journal %s",
            VERSION,
            self.grpc_port,
            self.http_port,
            address,
            page,
            journal,
            extra=event("serving", version=VERSION, address=str(address), page=page, journal=journal),
        )
        if self._shared is not None:
            host = self._config.advertise
            grpc, http = (host, host) if host is not None else (grpc, http)
            await self._shared.start(
                str(Address(grpc, self.grpc_port)),
                f"{self._scheme}://{Address(http, self.http_port)}",
                self._security.ca_pin,
            )

    @property
    def _scheme(self) -> str:
        return "http" if self._security.http.files is None else "https"

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_EVERY_S)
            await asyncio.to_thread(self._security.renew)

    def _make_torchft_server(
        self, service: LighthouseService, counters: Counters, peers: Peers, gate: OutputGate | None
    ) -> GrpcServer | None:
        if self._config.torchft_listen is None:
            return None
        name = "torchft.LighthouseService"
        of_torchft, access = {name: service.services()[name]}, self._security.torchft
        keepalive_s = self._config.keepalive_s
        return GrpcServer(of_torchft, (name,), access, counters.called, peers, gate, keepalive_s=keepalive_s)

    def state(self) -> str:
        """Describe the jobs in one line, for `systemctl status`."""
        jobs = [
            f"{name}: {machine.decision.verdict}, {len(machine.job.list_participants())} groups train"
            for name, machine in ((each.job, each.machine) for each in itertools.islice(self._jobs, JOBS_NAMED))
        ]
        return "; ".join(jobs) or "serving; no jobs"

    async def stop(self) -> None:
        """Refuse new calls, answer pending calls with an error, and close all connections."""
        self._is_ready = False
        for server in self._grpc_servers():
            await server.set_serving(False)
        if self._shared is None or self._shared.refusal() is None:
            self._jobs.close(_STOPPING)
        if self._shared is not None:
            await self._shared.stop()
        for task in self._repeating:
            task.cancel()
        if self._torchft is not None:
            await self._torchft.stop(self._config.shutdown_timeout_s)
        await self._grpc.stop(self._config.shutdown_timeout_s)
        await self._http.stop()
        if self._webhook is not None:
            await self._webhook.close()
        await self._incident_service.write_ledger()
        await asyncio.to_thread(self._incidents.close)
        self._memory.release()
        log.info("lighthouse stopped", extra=event("stopped"))

    # -- with --store

    def lead(self) -> None:
        """Load the records and start serving as the leader.

        As after a restart of the lighthouse, groups may still be training under the previous leader's standing quorums.
        """
        assert self._shared is not None
        self._jobs.load_records(self._shared.records.load())
        self._set_serving(True)

    def follow(self, refusal: NotLeader) -> None:
        """Become a follower: drop all jobs and runs, and answer their callers with `refusal`."""
        self._set_serving(False)
        ledger, self._incidents.ledger = self._incidents.ledger, Ledger()
        self._run(self._incident_service.write_ledger(ledger))
        self._jobs.drop_all(str(refusal))
        self._grpc.break_streams(refusal)
        self._http.close_feeds()

    def _set_serving(self, is_serving: bool) -> None:
        for server in self._grpc_servers():
            self._run(server.set_serving(is_serving))

    def _grpc_servers(self) -> list[GrpcServer]:
        return [server for server in (self._grpc, self._torchft) if server is not None]

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = start_part(work, "a change of leader", self._end)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _leader_redirect(self) -> LeaderRedirect | None:
        if self._shared is None or (refusal := self._shared.refusal()) is None:
            return None
        status = self._shared.status()
        leader = status.leader if status is not None else None
        return LeaderRedirect(str(refusal), leader.page if leader is not None else "")


def _hosts(config: LighthouseConfig) -> tuple[str, str]:
    return split_bind(config.bind, "--bind")[0], split_bind(config.http, "--http")[0]


async def serve(config: LighthouseConfig, announce_fd: int | None, stop: StopRequest) -> None:
    """Run the lighthouse until `stop` is set.

    Args:
        config: The options.
        announce_fd: File descriptor to which the gRPC port is written once the daemon serves, or None.
        stop: Set by a stop signal, or by the daemon if it cannot continue.
    """
    daemon = LighthouseDaemon(config, stop)
    systemd = ServiceManager(asyncio.get_running_loop(), daemon.state)
    await daemon.start()
    try:
        announce(announce_fd, daemon.grpc_port)
        systemd.ready()
        await stop.wait()
        systemd.stopping()
        log.info("stopping: closing calls and sessions", extra=event("stopping"))
    finally:
        await daemon.stop()
        systemd.close()


def _is_busy() -> bool:
    """Return whether this host has more runnable tasks than CPUs, or False if its load cannot be read."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        try:
            running = int(os.getloadavg()[0])
        except OSError:  # before glibc 2.36, it reads the same file, which ProcSubset=pid hides
            return False
    return running > (os.cpu_count() or 1)
