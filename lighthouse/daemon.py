"""`lighthouse serve`: gRPC and HTTP on one loop, until a signal."""

import dataclasses
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from lighthouse import dashboard
from lighthouse.config import LighthouseConfig
from lighthouse.jobs import Jobs
from lighthouse.metrics import Counters, LighthouseCollector, render
from lighthouse.service import REFLECTED, LighthouseService
from lighthouse_runtime.bind import grpc_bind
from lighthouse_runtime.http import Document, HttpServer, HttpSide
from lighthouse_runtime.loop import StopRequest
from lighthouse_runtime.server import ControlPolicy, GrpcServer
from protos import VERSION

log = logging.getLogger(__name__)

PAGE_HEADERS = {"Content-Security-Policy": dashboard.CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}


class LighthouseDaemon:
    """`grpc_port` and `http_port` are those it listens on, once started."""

    def __init__(self, config: LighthouseConfig, token: str | None, stop: Callable[[int], None]) -> None:
        self._config = config
        self._is_ready = False
        self._memory = config.memory()
        self._jobs = Jobs(config.quorum_config, self._memory, stop)
        counters = Counters()
        service = LighthouseService(self._jobs, ControlPolicy(token, config.allow_remote_control), counters)
        registry = CollectorRegistry()
        registry.register(LighthouseCollector(service.status, counters))
        self._grpc = GrpcServer(service.services(), REFLECTED, counters.called)
        self._http = HttpServer(
            HttpSide(
                is_ready=lambda: self._is_ready,
                metrics=lambda: render(registry),
                status=lambda: dataclasses.asdict(service.status()),
                page=Document(dashboard.page(), "text/html", PAGE_HEADERS),
            )
        )
        self.grpc_port = 0
        self.http_port = 0

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
        self.http_port = await self._http.start(self._config.http)
        try:
            self.grpc_port = await self._grpc.start(grpc_bind(self._config.bind))
        except Exception:
            await self._http.stop()
            raise
        self._is_ready = True
        log.info("lighthouse %s serves gRPC on port %d, HTTP on port %d", VERSION, self.grpc_port, self.http_port)

    async def stop(self) -> None:
        """Refuse what comes, end what waits, with the reason; then close every connection."""
        self._is_ready = False
        await self._grpc.set_serving(False)
        self._jobs.close("the lighthouse is shutting down; ask again, it or its successor will answer")
        await self._grpc.stop(self._config.drain_timeout_s)
        await self._http.stop()
        self._memory.release()
        log.info("lighthouse stopped")


async def serve(config: LighthouseConfig, token: str | None, announce: int | None, stop: StopRequest) -> None:
    """`announce`: a file descriptor to which gRPC's port is written once it serves."""
    daemon = LighthouseDaemon(config, token, stop)
    await daemon.start()
    try:
        if announce is not None:
            _announce(announce, daemon.grpc_port)
        await stop.wait()
        log.info("draining: asked to stop")
    finally:
        await daemon.stop()


def _announce(descriptor: int, port: int) -> None:
    with open(descriptor, "w") as pipe:
        pipe.write(f"{port}\n")
