"""gRPC channels as all our clients use them, and what it means when a call over one fails."""

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
from lighthouse_runtime.security.client_tls import ClientTls, refused_client
from lighthouse_runtime.security.pinned import bad_certificate, http_port, port_of, without_tls

# -- forks --------------------------------------------------------------------
#
# What a forked child may do with gRPC once its parent has used it: nothing, and it is told so.
#
# A child has none of the threads by which gRPC moves: there a call would wait past its deadline, for good. With its
# fork support gRPC starts them again; where a thread of the parent was in a call at that moment, which with an open
# stream is nearly always, the child then aborts at times, and the parent's stream may break. So processes of ours
# leave that off (GRPC_ENABLE_FORK_SUPPORT=0), and in a child a new channel is an error, whoever makes it. Set to 1,
# as gRPC's own documents ask of whoever needs it, a fork waits until gRPC is at rest, and the child may use it.

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_TRUE = ("1", "true", "yes")  # as gRPC reads it

_is_used = False


def note_use() -> None:
    """This process has a channel: what it forks from now on has no gRPC."""
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


# Never lower grpc.min_reconnect_backoff_ms: it is the connect timeout too, and a thousand clients that join at once
# live-lock. A proxy of the environment never stands between the parts of one training job.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.bdp_probe", 0),  # as the server's (server/grpc_server.py)
    ("grpc.http2.lookahead_bytes", 2**20),  # instead: a list of 10,000 groups has as much
]

# What grpc.aio says in place of the status of a stream that the server ends while the client still writes.
_BROKEN_WHILE_WRITING = "Internal error from Core"


def sync_channel(coordinator: Coordinator, tls: ClientTls | None) -> grpc.Channel:
    """`tls`: None: none. Raises WrongState in a forked child that can use no gRPC."""
    note_use()
    if tls is None:
        return grpc.insecure_channel(str(coordinator.addresses[0]), options=_OPTIONS)
    return grpc.secure_channel(str(coordinator.addresses[0]), _credentials(tls), options=_options(tls))


def async_channel(coordinator: Coordinator, tls: ClientTls | None) -> grpc.aio.Channel:
    """As sync_channel()."""
    note_use()
    if tls is None:
        return grpc.aio.insecure_channel(str(coordinator.addresses[0]), options=_OPTIONS)
    return grpc.aio.secure_channel(str(coordinator.addresses[0]), _credentials(tls), options=_options(tls))


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.roots, tls.key, tls.cert)


def _options(tls: ClientTls) -> list[tuple[str, int | str]]:
    return [*_OPTIONS, ("grpc.ssl_target_name_override", tls.name)] if tls.name else _OPTIONS


def refusal(error: grpc.RpcError, address: str, timeout_s: float, asked: Coordinator | None = None) -> LighthouseError:
    """What a failed call means to its caller. `asked`: by what TLS, if by any."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    status, details = error.code(), error.details() or ""
    told = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    if told.get(REFUSAL_METADATA_KEY) == NotLeader.__name__:
        return NotLeader(f"{address}: {cut_reason(details)}", leader=told.get(LEADER_METADATA_KEY, ""))
    if REFUSAL_METADATA_KEY in told:
        return error_of(status, details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{address} did not answer within {timeout_s:g} s")
    if status is grpc.StatusCode.INTERNAL and details == _BROKEN_WHILE_WRITING:
        return Unreachable(f"{address} closed the stream during a write")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # cancelled: by a server that stops
        return _unreachable(address, details, asked)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NotServed(
            f"{address} speaks gRPC but does not know this call: a manager's port instead of a lighthouse's (or the "
            "reverse), or another version; fix the address, or install the same version everywhere"
        )
    return error_of(status, details)


def _unreachable(address: str, details: str, asked: Coordinator | None) -> Unreachable:
    """In words, what gRPC says of a connection that it could not make."""
    if "http1.x server" in details or "missing selected ALPN" in details:
        return WrongProtocol(http_port(address))
    if "Failed parsing HTTP/2" in details:
        return WrongProtocol(f"{address} is unreachable: the service at this port does not speak gRPC")
    if "Connection refused" in details:
        return Unreachable(f"{address} is unreachable: connection refused; is it running at this address?")
    if "errors resolving" in details or "DNS resolution failed" in details:
        return Unreachable(f"{address} is unreachable: this host cannot resolve the name; fix the name or the DNS")
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        ca_file = "" if asked is None or asked.ca_pin else asked.files.ca
        return Untrusted(bad_certificate(address, details.rpartition("CERTIFICATE_VERIFY_FAILED:")[2], ca_file))
    if "WRONG_VERSION_NUMBER" in details:
        return WrongProtocol(without_tls(address))
    if details.startswith("failed to connect") and "Socket closed" in details and asked is not None and asked.has_tls:
        return Unreachable(refused_client(address, asked.files))
    if details.startswith("failed to connect") and "Socket closed" in details:
        command = token_command(port_of(address), "join")
        return Unreachable(
            f"{address} is unreachable: it closes connections at once, as a lighthouse with TLS does to clients "
            f"without TLS; pass its join string, which {command} prints on its host, or --tls-ca for your own PKI"
        )
    return Unreachable(f"{address} is unreachable: {details}")
