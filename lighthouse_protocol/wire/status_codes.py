"""One table for both ends: refusal class <-> gRPC status; and its name, where a refusal is part of a message."""

import grpc

from lighthouse_protocol import refusals
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.refusals import LighthouseError

_STATUS: dict[type[LighthouseError], grpc.StatusCode] = {
    refusals.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    refusals.DuplicateReplica: grpc.StatusCode.ALREADY_EXISTS,
    refusals.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    refusals.Unrecoverable: grpc.StatusCode.DATA_LOSS,  # gRPC makes this status of nothing by itself
    refusals.UnknownName: grpc.StatusCode.NOT_FOUND,
    refusals.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    refusals.NotServed: grpc.StatusCode.UNIMPLEMENTED,
    refusals.Superseded: grpc.StatusCode.ABORTED,
    refusals.Drained: grpc.StatusCode.OUT_OF_RANGE,  # past the end; gRPC makes this status of nothing by itself
    refusals.LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    refusals.NotLeader: grpc.StatusCode.FAILED_PRECONDITION,
    refusals.Unreachable: grpc.StatusCode.UNAVAILABLE,
    refusals.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    refusals.InternalError: grpc.StatusCode.INTERNAL,
}
_CLASS = {status: cls for cls, status in _STATUS.items() if cls is not refusals.NotLeader} | {
    grpc.StatusCode.CANCELLED: refusals.DeadlinePassed,
    grpc.StatusCode.UNKNOWN: refusals.InternalError,
    grpc.StatusCode.UNAUTHENTICATED: refusals.NotPermitted,
}
_KINDS = {cls.__name__: cls for cls in (LighthouseError, *LighthouseError.__subclasses__())}


def status_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status that carries `error`; INTERNAL for what is not a refusal of ours."""
    return next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), grpc.StatusCode.INTERNAL)


def error_of(status: grpc.StatusCode, details: str | None) -> LighthouseError:
    """The refusal that a caller raises for a call that ended with `status`."""
    return _CLASS.get(status, refusals.InternalError)(cut_reason(details or status.name.lower().replace("_", " ")))


def kind_of(error: LighthouseError) -> str:
    """The name that the other side knows it by: a more special refusal goes as its kind."""
    return next(cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls)


def refusal_of(kind: str, text: str) -> LighthouseError:
    """A refusal that only a newer version knows is a plain one."""
    return _KINDS.get(kind, LighthouseError)(cut_reason(text))
