"""One table for both ends: refusal class <-> gRPC status."""

import grpc

from protos.refusals import (
    DeadlinePassed,
    Drained,
    DuplicateReplica,
    InternalError,
    InvalidRequest,
    LighthouseError,
    LimitReached,
    NotPermitted,
    NotServed,
    Superseded,
    UnknownName,
    Unreachable,
    WrongState,
)

_STATUS: dict[type[LighthouseError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    DuplicateReplica: grpc.StatusCode.ALREADY_EXISTS,
    WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownName: grpc.StatusCode.NOT_FOUND,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    NotServed: grpc.StatusCode.UNIMPLEMENTED,
    Superseded: grpc.StatusCode.ABORTED,
    Drained: grpc.StatusCode.OUT_OF_RANGE,  # past the end; gRPC makes this status of nothing by itself
    LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    InternalError: grpc.StatusCode.INTERNAL,
}
_CLASS = {status: cls for cls, status in _STATUS.items()} | {
    grpc.StatusCode.CANCELLED: DeadlinePassed,
    grpc.StatusCode.UNKNOWN: InternalError,
    grpc.StatusCode.UNAUTHENTICATED: NotPermitted,
    grpc.StatusCode.DATA_LOSS: InternalError,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status that carries `error`; INTERNAL for what is not a refusal of ours."""
    return next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), grpc.StatusCode.INTERNAL)


def error_of(status: grpc.StatusCode, details: str | None) -> LighthouseError:
    """The refusal that a caller raises for a call that ended with `status`."""
    return _CLASS.get(status, InternalError)(details or status.name.lower().replace("_", " "))
