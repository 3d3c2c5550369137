"""What a failed call means to its caller."""

import grpc
import grpc.aio
import pytest

from lighthouse_runtime.channel import refusal
from protos.limits import REFUSAL_METADATA_KEY
from protos.refusals import DeadlinePassed, InternalError, LighthouseError, Unreachable, WrongState

S = grpc.StatusCode


def failed(status: grpc.StatusCode, details: str, *, is_ours: bool = False) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((REFUSAL_METADATA_KEY, "x")) if is_ours else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details)


@pytest.mark.parametrize(
    ("status", "details", "kind", "words"),
    [
        (S.UNAVAILABLE, "connection refused", Unreachable, "h:1 is unreachable: connection refused"),
        (S.CANCELLED, "", Unreachable, "h:1 is unreachable"),
        (S.DEADLINE_EXCEEDED, "", DeadlinePassed, "h:1 gave no answer within 2 s"),
        (S.INTERNAL, "Internal error from Core", Unreachable, "h:1 has ended the stream while it was written to"),
        (S.INTERNAL, "oops", InternalError, "oops"),
    ],
)
def test_without_a_word_of_ours(status: grpc.StatusCode, details: str, kind: type[LighthouseError], words: str) -> None:
    error = refusal(failed(status, details), "h:1", 2.0)
    assert type(error) is kind
    assert words in str(error)


def test_a_refusal_of_ours_is_that() -> None:
    error = refusal(failed(S.FAILED_PRECONDITION, "step: is odd", is_ours=True), "h:1", 2.0)
    assert (type(error), str(error)) == (WrongState, "step: is odd")
    assert isinstance(refusal(failed(S.DEADLINE_EXCEEDED, "late", is_ours=True), "h:1", 2.0), DeadlinePassed)
