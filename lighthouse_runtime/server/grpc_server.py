"""The gRPC server of the lighthouse and the manager, with health checks, reflection and graceful shutdown."""

from collections.abc import Mapping, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lighthouse_protocol.limits import KEEPALIVE_S, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_runtime.net.address import resolves, split_bind
from lighthouse_runtime.security.access import Access
from lighthouse_runtime.server.rpc_handler import Entry, Observer, Peers, RpcHandlers
from lighthouse_runtime.server.streams import OutputGate

# grpcio queues a call before any of our code sees it, and cancels queued calls of all clients at random when 1,000 are
# waiting. A call that its client has reset stays in the queue and counts here, so one connection cannot fill the queue.
# Our own processes use one connection and fewer than ten streams; RFC 9113 advises against a limit below 100.
MAX_STREAMS_PER_CONNECTION = 100

# Idle clients ping, some every 60 s. grpcio's defaults close their connections after 240 s ("too_many_pings").
# grpcio ignores a misspelt option silently, so a test checks each.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),  # it sends a ping with nearly every message, a third of a heartbeat's cost
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),  # gRPC's default is 120 s
    ("grpc.max_connection_idle_ms", 300_000),  # without calls; the client reconnects for its next call
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
]


def options(keepalive_s: float) -> list[tuple[str, int]]:
    half_ms = round(1000 * keepalive_s / 2)
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [*_OPTIONS, *((name, half_ms) for name in names)]


class GrpcServer:
    def __init__(
        self,
        services: Mapping[str, Mapping[str, Entry]],
        reflected: Sequence[str],
        access: Access,
        observe: Observer = lambda method, status: None,
        peers: Peers | None = None,
        gate: OutputGate | None = None,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Register the services.

        Args:
            services: Methods by full service name.
            reflected: Services that gRPC reflection lists.
            access: Authorises callers. Health checks and reflection are open to all.
            observe: Receives the method and status of each answered call, and of each stream that closed without
                breaking.
            peers: Limits per peer. None for no limits.
            gate: Delays output until it may be sent. Health checks and reflection bypass it.
            keepalive_s: Seconds after which an unresponsive connection is closed.
        """
        self._server = grpc.aio.server(options=options(keepalive_s))
        self._gate = gate or OutputGate()
        self._serving = RpcHandlers(observe, access, self._gate, peers)
        for name, methods in services.items():
            handlers = {method: self._serving.rpc_handler(name, method, entry) for method, entry in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._names = ["", *services]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*reflected, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self, bind: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `bind` (HOST:PORT), with TLS if `credentials` are given.

        Returns:
            The port in use.

        Raises:
            InvalidRequest: The server cannot listen on `bind`.
        """
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as e:
            why = "the port is taken, or the address is not this host's; choose another (port 0 takes a free one)"
            if not resolves(split_bind(bind, "--bind")[0]):
                why = "this host name does not resolve here; give an address of this host, or [::]:PORT for all"
            raise InvalidRequest(f"cannot listen on {bind}: {why}", field="--bind") from e
        await self._server.start()
        await self.set_serving(self._gate.is_open)
        return port

    async def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    def break_streams(self, error: LighthouseError) -> None:
        """Discard queued messages and close all streams with the status of `error`. New streams are still accepted."""
        self._serving.break_streams(error)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, close all streams, and give running calls `grace_s` seconds to finish."""
        self._serving.end_streams("the server is stopping")
        await self._server.stop(grace_s)
