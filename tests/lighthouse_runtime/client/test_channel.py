"""What a failed call means to its caller."""

import grpc
import grpc.aio
import pytest

from lighthouse_protocol.limits import REFUSAL_METADATA_KEY
from lighthouse_protocol.refusals import (
    DeadlinePassed,
    InternalError,
    LighthouseError,
    NotServed,
    Unreachable,
    WrongProtocol,
    WrongState,
)
from lighthouse_runtime.client.connection import refusal

S = grpc.StatusCode


def failed(status: grpc.StatusCode, details: str, *, is_ours: bool = False) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((REFUSAL_METADATA_KEY, "x")) if is_ours else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details)


FAILED = "failed to connect to all addresses; last error: "
REFUSED = FAILED + "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
PARSING = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)"
HTTP = FAILED + f"INTERNAL: ipv4:127.0.0.1:2: {PARSING} (Trying to connect an http1.x server (HTTP status 400))"
OTHER = FAILED + f"UNAVAILABLE: ipv4:127.0.0.1:3: {PARSING}"
NO_NAME = "errors resolving x:1: [field:hostname lookup error:address lookup failed for x:1: Domain name not found]"


@pytest.mark.parametrize(
    ("status", "details", "kind", "words"),
    [
        (S.UNAVAILABLE, "connection refused", Unreachable, "h:1 is unreachable: connection refused"),
        (S.CANCELLED, "", Unreachable, "h:1 is unreachable"),
        (S.DEADLINE_EXCEEDED, "", DeadlinePassed, "h:1 did not answer within 2 s"),
        (S.INTERNAL, "Internal error from Core", Unreachable, "h:1 closed the stream during a write"),
        (S.INTERNAL, "oops", InternalError, "oops"),
        (S.UNAVAILABLE, REFUSED, Unreachable, "h:1 is unreachable: connection refused"),
        (S.UNAVAILABLE, HTTP, WrongProtocol, "h:1 is unreachable: this is an HTTP port, not a gRPC port"),
        (S.UNAVAILABLE, OTHER, WrongProtocol, "h:1 is unreachable: the service at this port"),
        (S.UNAVAILABLE, NO_NAME, Unreachable, "h:1 is unreachable: this host cannot resolve the name"),
        (
            S.UNIMPLEMENTED,
            "Method not found!",
            NotServed,
            "h:1 speaks gRPC but does not know this call: a manager's port",
        ),
    ],
)
def test_without_a_word_of_ours(status: grpc.StatusCode, details: str, kind: type[LighthouseError], words: str) -> None:
    error = refusal(failed(status, details), "h:1", 2.0)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize(("address", "is_web_page"), [("h:29511", True), ("h:29510", False)])
def test_a_port_with_tls_may_be_that_of_the_web_page(address: str, is_web_page: bool) -> None:
    error = refusal(failed(S.UNAVAILABLE, FAILED + "UNAVAILABLE: ipv4:127.0.0.1:3: Socket closed"), address, 2.0)
    assert "as a lighthouse with TLS does to clients without TLS" in str(error)
    assert ("29511 is the port of its web page, and 29510 that of gRPC" in str(error)) is is_web_page


def test_a_refusal_of_ours_is_that() -> None:
    error = refusal(failed(S.FAILED_PRECONDITION, "step: is odd", is_ours=True), "h:1", 2.0)
    assert (type(error), str(error)) == (WrongState, "step: is odd")
    assert isinstance(refusal(failed(S.DEADLINE_EXCEEDED, "late", is_ours=True), "h:1", 2.0), DeadlinePassed)
