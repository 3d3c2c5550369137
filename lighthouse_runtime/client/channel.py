"""gRPC channels as all our clients use them, and what it means when a call over one fails."""

import grpc
import grpc.aio

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import (
    LIGHTHOUSE_HTTP_PORT,
    LIGHTHOUSE_PORT,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    REFUSAL_METADATA_KEY,
)
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InvalidRequest,
    LighthouseError,
    NotServed,
    Unreachable,
    WrongProtocol,
)
from lighthouse_protocol.wire.status_codes import error_of

# Never lower grpc.min_reconnect_backoff_ms: it is the connect timeout too, and a thousand clients that join at once
# live-lock. A proxy of the environment never stands between the parts of one training job.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

# What grpc.aio says in place of the status of a stream that the server ends while the client still writes.
_BROKEN_WHILE_WRITING = "Internal error from Core"


def target(address: str, field: str = "address", default_port: int | None = None) -> str:
    """`address` as gRPC writes it. Raises InvalidRequest that names `field`."""
    parsed = parse_address(address, field)
    port = parsed.port if parsed.port is not None else default_port
    if not port:
        raise InvalidRequest(f"{address!r} has no port; write host:port", field=field)
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return f"{host}:{port}"


def sync_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(target(address), options=_OPTIONS)


def async_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target(address), options=_OPTIONS)


def refusal(error: grpc.RpcError, address: str, timeout_s: float) -> LighthouseError:
    """What a failed call means to its caller."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    status, details = error.code(), error.details() or ""
    if any(key == REFUSAL_METADATA_KEY for key, _ in error.trailing_metadata() or ()):
        return error_of(status, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{address} gave no answer within {timeout_s:g} s")
    if status is grpc.StatusCode.INTERNAL and details == _BROKEN_WHILE_WRITING:
        return Unreachable(f"{address} has ended the stream while it was written to")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # cancelled: by a server that stops
        return _unreachable(address, details)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NotServed(
            f"{address} serves gRPC and not this call ({details}): is it the port of a manager instead of a "
            "lighthouse's, the other way round, or another version?"
        )
    return error_of(status, details)


def _unreachable(address: str, details: str) -> Unreachable:
    """In words, what gRPC says of a connection that it could not make."""
    if "http1.x server" in details:
        return WrongProtocol(
            f"{address} is unreachable: an HTTP port and no gRPC port; a lighthouse listens for gRPC on "
            f"{LIGHTHOUSE_PORT} and for HTTP on {LIGHTHOUSE_HTTP_PORT} unless told otherwise"
        )
    if "Failed parsing HTTP/2" in details:
        return WrongProtocol(f"{address} is unreachable: another service listens there, and it does not speak gRPC")
    if "Connection refused" in details:
        return Unreachable(
            f"{address} is unreachable: nothing listens there (connection refused); start it, or mend the address"
        )
    if "errors resolving" in details or "DNS resolution failed" in details:
        return Unreachable(f"{address} is unreachable: this host name does not resolve here; mend the name, or the DNS")
    return Unreachable(f"{address} is unreachable: {details}")
