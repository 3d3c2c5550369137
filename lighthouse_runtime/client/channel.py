"""gRPC channels of our clients, and the conversion of gRPC errors into LighthouseErrors."""

import os
from typing import NoReturn

import grpc
import grpc.aio

from lighthouse_protocol.coordinator import Coordinator, token_command
from lighthouse_protocol.limits import (
    LEADER_METADATA_KEY,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    REFUSAL_METADATA_KEY,
    cut_reason,
)
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    LighthouseError,
    NotLeader,
    NotServed,
    Unreachable,
    Untrusted,
    WrongProtocol,
    WrongState,
)
from lighthouse_protocol.wire.codec import error_of
from lighthouse_runtime.security.client_tls import ClientTls, refused_client_message
from lighthouse_runtime.security.pinned import bad_certificate_message, http_port_message, no_tls_message, port_of

# Forks. A forked child of a process that has used gRPC must not use it, and gets an error if it tries.
#
# The child lacks gRPC's threads, so its calls would wait forever, past their deadlines. gRPC's fork support restarts
# the threads, but if a thread of the parent was in a call at that moment (nearly always, with an open stream), the
# child sometimes aborts and the parent's stream may break. So our processes disable it (GRPC_ENABLE_FORK_SUPPORT=0),
# and creating a channel in a child raises an error. With 1, as gRPC's documentation advises, a fork waits until gRPC
# is idle, and the child may use it.

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_TRUE = ("1", "true", "yes")  # as gRPC reads it

_is_used = False


def mark_grpc_used() -> None:
    """Record that this process uses gRPC. Children forked later cannot use it."""
    global _is_used
    _is_used = True


def _refuse(*_: object, **__: object) -> NoReturn:
    raise WrongState(
        f"process {os.getpid()} was forked from one that uses gRPC, and a call of its own would never end: start it "
        f"with multiprocessing's spawn or forkserver, or set {VARIABLE}=1 before the parent starts (a fork may then "
        "take 5 s); lighthouse-manager run --observe off leaves a script without an Agent alone"
    )


def _after_fork() -> None:
    if _is_used and os.environ.get(VARIABLE, "").lower() not in _TRUE:
        for module in (grpc, grpc.aio):
            for make_channel in ("insecure_channel", "secure_channel"):
                setattr(module, make_channel, _refuse)


os.register_at_fork(after_in_child=_after_fork)


# Never lower grpc.min_reconnect_backoff_ms: it is also the connect timeout, and a thousand clients that join at once
# would live-lock. Proxies of the environment are ignored within a training job.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.bdp_probe", 0),  # as in server/grpc_server.py
    ("grpc.http2.lookahead_bytes", 2**20),  # replaces the probe; a list of 10,000 groups has this size
]

# grpc.aio's details, in place of the server's, if the server closes a stream while the client writes.
_BROKEN_WHILE_WRITING = "Internal error from Core"


def sync_channel(coordinator: Coordinator, tls: ClientTls | None) -> grpc.Channel:
    """Open a channel to the coordinator's first address, with TLS if `tls` is given.

    Raises:
        WrongState: This process was forked from one that uses gRPC.
    """
    mark_grpc_used()
    if tls is None:
        return grpc.insecure_channel(str(coordinator.addresses[0]), options=_OPTIONS)
    return grpc.secure_channel(str(coordinator.addresses[0]), _credentials(tls), options=_options(tls))


def async_channel(coordinator: Coordinator, tls: ClientTls | None) -> grpc.aio.Channel:
    """Open a channel for asyncio. Otherwise the same as sync_channel()."""
    mark_grpc_used()
    if tls is None:
        return grpc.aio.insecure_channel(str(coordinator.addresses[0]), options=_OPTIONS)
    return grpc.aio.secure_channel(str(coordinator.addresses[0]), _credentials(tls), options=_options(tls))


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.roots, tls.key, tls.cert)


def _options(tls: ClientTls) -> list[tuple[str, int | str]]:
    return [*_OPTIONS, ("grpc.ssl_target_name_override", tls.name)] if tls.name else _OPTIONS


def refusal(error: grpc.RpcError, address: str, timeout_s: float, asked: Coordinator | None = None) -> LighthouseError:
    """Convert the gRPC error of a failed call or stream.

    Args:
        error: gRPC's error.
        address: Address of the server, for the message.
        timeout_s: Timeout of the call in seconds, for the message.
        asked: The server and its TLS settings, to explain a failed handshake.
    """
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    status, details = error.code(), error.details() or ""
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    if metadata.get(REFUSAL_METADATA_KEY) == NotLeader.__name__:
        return NotLeader(f"{address}: {cut_reason(details)}", leader=metadata.get(LEADER_METADATA_KEY, ""))
    if REFUSAL_METADATA_KEY in metadata:
        return error_of(status, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{address} did not answer within {timeout_s:g} s")
    if status is grpc.StatusCode.INTERNAL and details == _BROKEN_WHILE_WRITING:
        return Unreachable(f"{address} closed the stream during a write")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # a stopping server cancels calls
        return _unreachable(address, details, asked)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NotServed(
            f"{address} speaks gRPC but does not know this call: a manager's port instead of a lighthouse's (or the "
            "reverse), or another version; fix the address, or install the same version everywhere"
        )
    return error_of(status, details)


def _unreachable(address: str, details: str, asked: Coordinator | None) -> Unreachable:
    """Return an exception that explains why gRPC could not connect. `details` is gRPC's message."""
    if "http1.x server" in details or "missing selected ALPN" in details:
        return WrongProtocol(http_port_message(address))
    if "Failed parsing HTTP/2" in details:
        return WrongProtocol(f"{address} is unreachable: the service at this port does not speak gRPC")
    if "Connection refused" in details:
        return Unreachable(f"{address} is unreachable: connection refused; is it running at this address?")
    if "errors resolving" in details or "DNS resolution failed" in details:
        return Unreachable(f"{address} is unreachable: this host cannot resolve the name; fix the name or the DNS")
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        ca_file = "" if asked is None or asked.ca_pin else asked.files.ca
        return Untrusted(bad_certificate_message(address, details.rpartition("CERTIFICATE_VERIFY_FAILED:")[2], ca_file))
    if "WRONG_VERSION_NUMBER" in details:
        return WrongProtocol(no_tls_message(address))
    if details.startswith("failed to connect") and "Socket closed" in details and asked is not None and asked.has_tls:
        return Unreachable(refused_client_message(address, asked.files))
    if details.startswith("failed to connect") and "Socket closed" in details:
        command = token_command(port_of(address), "join")
        return Unreachable(
            f"{address} is unreachable: it closes connections at once, as a lighthouse with TLS does to clients "
            f"without TLS; pass its join string, which {command} prints on its host, or --tls-ca for your own PKI"
        )
    return Unreachable(f"{address} is unreachable: {details}")
