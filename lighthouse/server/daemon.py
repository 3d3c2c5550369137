"""`lighthouse serve`: gRPC and HTTP on one loop, until a signal."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from lighthouse import dashboard
from lighthouse.incidents.files import IncidentFiles
from lighthouse.incidents.metrics import IncidentCollector
from lighthouse.incidents.registry import IncidentRegistry
from lighthouse.incidents.rules.policy import OnStall
from lighthouse.journal.journal import Journal
from lighthouse.progress.metrics import PhaseCollector
from lighthouse.quorum.metrics import Counters, LighthouseCollector, render
from lighthouse.quorum.registry import JobRegistry
from lighthouse.runs.metrics import RunCollector
from lighthouse.runs.registry import RunRegistry
from lighthouse.runs.store import RunStoreInProcess
from lighthouse.server.config import LighthouseConfig
from lighthouse.server.incident_service import IncidentService
from lighthouse.server.quorum_service import REFLECTED, LighthouseService
from lighthouse.server.run_service import RunService
from lighthouse_protocol import VERSION
from lighthouse_protocol.identity import Address
from lighthouse_protocol.messages.incident import to_document
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.net.bind import grpc_bind, split_bind
from lighthouse_runtime.net.own_address import served_host
from lighthouse_runtime.process.loop import StopRequest, announce
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.grpc_server import GrpcServer
from lighthouse_runtime.server.rpc_handler import Call
from lighthouse_runtime.web.control import HttpControl, KillOrder
from lighthouse_runtime.web.server import Document, HttpServer, HttpSide

log = logging.getLogger(__name__)

_STOPPING = "the lighthouse is shutting down; ask again, it or its successor will answer"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": dashboard.CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LighthouseDaemon:
    """`grpc_port` and `http_port` are those it listens on, once started."""

    def __init__(self, config: LighthouseConfig, token: str | None, stop: Callable[[int], None]) -> None:
        self._config = config
        self._is_ready = False
        self._memory = config.memory()
        self._incidents = self._make_incident_registry()
        self._jobs = JobRegistry(
            config.quorum_config,
            asyncio.get_running_loop(),
            self._memory,
            stop,
            config.stall_timeout_s,
            self._incidents,
            runs=lambda job: self._runs.of_job(job),
        )
        runs_kept = self._memory if isinstance(self._memory, Journal) else RunStoreInProcess()
        self._runs = RunRegistry(
            runs_kept,
            config.rank_timeout_s,
            self._jobs.lag,
            self._jobs.guarded,
            self._incidents.make_id,
            self._incidents.report,
            lambda job: self._jobs.get(job).run_moved(),
            Limits(config.stall_timeout_s),
        )
        counters, policy = Counters(), ControlPolicy(token, config.allow_remote_control)
        service = LighthouseService(self._jobs, policy, counters, runs=self._runs.live_status)
        registry = CollectorRegistry()
        registry.register(LighthouseCollector(service.status, counters))
        registry.register(RunCollector(self._runs.live_status))
        registry.register(PhaseCollector(lambda: {driver.job: driver.progress.seconds for driver in self._jobs}))
        registry.register(IncidentCollector(self._incidents.times))
        more = {
            **RunService(self._runs, policy).methods(),
            **IncidentService(self._jobs, self._incidents, policy).methods(),
        }
        self._grpc = GrpcServer(service.services(more), REFLECTED, counters.called)
        self._http = HttpServer(
            HttpSide(
                is_ready=lambda: self._is_ready,
                metrics=lambda: render(registry),
                status=lambda: self._status(service),
                page=Document(dashboard.page(), "text/html", PAGE_HEADERS),
                control=HttpControl(policy, lambda order, call: _kill(service, order, call), _hosts(config)),
                incident=lambda name: to_document(self._incidents.archive.get(name)),
            )
        )
        self.grpc_port = 0
        self.http_port = 0

    def _make_incident_registry(self) -> IncidentRegistry:
        folder = self._config.incident_folder(self._memory)
        files = None if folder is None else IncidentFiles(folder)
        return IncidentRegistry(
            OnStall(self._config.on_stall),
            files,
            lambda *asked: self._runs.stop_all(*asked),
            lambda *asked: self._runs.restart(*asked),
        )

    def _status(self, service: LighthouseService) -> dict[str, Any]:
        """Nothing in it changes any more."""
        status = service.status(has_ranks=True)
        shown = {name: getattr(status, name) for name in LighthouseStatus.__slots__}
        return {**shown, "now_unix_s": time.time()}

    async def start(self) -> None:
        """Raises a refusal, naming the option, if an address cannot be listened on or the journal cannot be had."""
        try:
            await self._start()
        except BaseException:
            self._memory.release()
            raise

    async def _start(self) -> None:
        if self._memory.claim():
            self._jobs.remember(self._memory.load())
        await asyncio.to_thread(self._incidents.load)
        self.http_port = await self._http.start(self._config.http)
        try:
            self.grpc_port = await self._grpc.start(grpc_bind(self._config.bind))
        except Exception:
            await self._http.stop()
            raise
        self._is_ready = True
        grpc, http = [await asyncio.to_thread(served_host, host) for host in _hosts(self._config)]
        log.info(
            "lighthouse %s serves gRPC on port %d, HTTP on port %d: managers reach it at %s, browsers at http://%s/",
            VERSION,
            self.grpc_port,
            self.http_port,
            Address(grpc, self.grpc_port),
            Address(http, self.http_port),
        )

    async def stop(self) -> None:
        """Refuse what comes, end what waits, with the reason; then close every connection."""
        self._is_ready = False
        await self._grpc.set_serving(False)
        self._runs.close(_STOPPING)
        self._jobs.close(_STOPPING)
        await self._grpc.stop(self._config.shutdown_timeout_s)
        await self._http.stop()
        await asyncio.to_thread(self._incidents.close)
        self._memory.release()
        log.info("lighthouse stopped")


async def _kill(service: LighthouseService, order: KillOrder, call: Call) -> None:
    request = lighthouse_pb2.LighthouseKillRequest(job=order.job, replica_id=order.replica_id, msg=order.reason)
    await service.kill(request, call)


def _hosts(config: LighthouseConfig) -> tuple[str, str]:
    """The names by which it was told to listen."""
    return split_bind(config.bind, "--bind")[0], split_bind(config.http, "--http")[0]


async def serve(config: LighthouseConfig, token: str | None, announce_fd: int | None, stop: StopRequest) -> None:
    """`announce_fd`: a file descriptor to which gRPC's port is written once it serves."""
    daemon = LighthouseDaemon(config, token, stop)
    await daemon.start()
    try:
        announce(announce_fd, daemon.grpc_port)
        await stop.wait()
        log.info("draining: asked to stop")
    finally:
        await daemon.stop()
