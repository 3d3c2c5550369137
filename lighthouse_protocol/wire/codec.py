"""Codecs between message dataclasses and protobuf, and the mapping of LighthouseErrors to gRPC statuses.

A dataclass and its protobuf message have the same name and the same field names. The annotations of the fields contain
the constraints (constraints.py). Each codec is generated as Python source and compiled once, on import, so it is as
fast as hand-written code.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lighthouse_protocol import refusals
from lighthouse_protocol.constraints import DroppedIfInvalid, Shortened, UnknownAs, WireForm
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.chaos import FaultOrder
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary, RankEvidence
from lighthouse_protocol.messages.membership import Distrust, World
from lighthouse_protocol.messages.run import Keys, RunStatus
from lighthouse_protocol.messages.status import LighthouseStatus, ManagerStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import chaos_pb2, evidence_pb2, incident_pb2, refusal_pb2, run_pb2
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError

M = TypeVar("M")
P = TypeVar("P", bound=Message)


class Codec(NamedTuple, Generic[M, P]):
    """Functions that convert between a message class and its protobuf message.

    `read` checks the fields and raises InvalidRequest, which names the invalid field. `write` does not check. `fields`
    returns what an enclosing message is built from: a dict, which is faster, or a message if the codec is hand-written.
    """

    schema: type[P]
    write: Callable[[M], P]
    read: Callable[[P], M]
    fields: Callable[[M], Any]


CODECS: dict[type[Any], Codec[Any, Any]] = {}  # by message class


def register_codec(cls: type[M], schema: type[P], write: Callable[[M], P], read: Callable[[P], M]) -> Codec[M, P]:
    """Register a hand-written codec for a class whose fields do not match its protobuf message.

    Compiled codecs also use it for fields of this class.
    """
    CODECS[cls] = Codec(schema, write, read, write)
    return CODECS[cls]


def compiled(cls: type[M], schema: type[P]) -> Codec[M, P]:
    """Return the codec of a dataclass or NamedTuple, compiling it on first use.

    A class may define two methods. `fitted` returns a copy that fits into a message, and is called on write and
    read. `check` is called on read, and raises InvalidRequest if fields contradict each other. Raise TypeError if
    the field names of `cls` and `schema` differ.
    """
    if cls in CODECS:
        return CODECS[cls]
    descriptor = schema.DESCRIPTOR
    hints = get_type_hints(cls, include_extras=True)
    oneofs = {oneof.name: oneof for oneof in descriptor.oneofs if oneof.name in hints}
    single = (f for f in descriptor.fields if f.containing_oneof is None or f.containing_oneof.name not in oneofs)
    sources = {field.name: field for field in single} | oneofs
    if differing := hints.keys() ^ sources.keys():
        raise TypeError(f"{cls.__name__} and {descriptor.full_name} differ in {', '.join(sorted(differing))}")
    scope: dict[str, Any] = {"cls": cls, "schema": schema, "missing": _missing, "checked": _checked}
    written: list[str] = []
    read: list[str] = []
    for name, hint in hints.items():
        compile_one = _oneof if name in oneofs else _field
        one_written, one_read = compile_one(hint, sources[name], scope)
        written.append(one_written)
        read.append(one_read)
    fitted = ".fitted()" if hasattr(cls, "fitted") else ""
    checked = ("checked(", ")") if hasattr(cls, "check") else ("", "")
    source = f"""
def fields(value):
    {"value = value.fitted()" if fitted else ""}
    return {{{", ".join(written)}}}

def write(value):
    return schema(**fields(value))

def read(message):
    return {checked[0]}cls({", ".join(read)}){fitted}{checked[1]}
"""
    exec(source, scope)
    CODECS[cls] = Codec(schema, scope["write"], scope["read"], scope["fields"])
    return CODECS[cls]


class Oneof:
    """Codec of a protobuf oneof whose fields are messages. The class of a value selects the field."""

    def __init__(self, union: Any, oneof: Any, advisory: Iterable[type[Any]] = ()) -> None:
        """Compile the codecs. Raise TypeError if the classes of `union` are not the messages of the descriptor `oneof`.

        Invalid messages of the `advisory` classes are read as None instead of raising InvalidRequest.
        """
        classes = {_schema_name(cls): cls for cls in get_args(union)}
        fields = {field.message_type.name: field for field in oneof.fields}
        if differing := classes.keys() ^ fields.keys():
            raise TypeError(f"{oneof.full_name} and its classes differ in {', '.join(sorted(differing))}")
        self._name = oneof.name
        self._writers: dict[type[Any], tuple[str, Callable[[Any], Any]]] = {}
        self._readers: dict[str, Callable[[Any], Any]] = {}
        for name, cls in classes.items():
            codec = compiled(cls, GetMessageClass(fields[name].message_type))
            self._writers[cls] = fields[name].name, codec.fields
            self._readers[fields[name].name] = _or_none(codec.read) if cls in advisory else codec.read

    def write(self, value: Any) -> dict[str, Any]:
        """Return `value` as keyword arguments of the enclosing message."""
        cls = type(value)
        if cls not in self._writers:  # a subclass, for example of LighthouseError
            cls = next(base for base in cls.__mro__ if base in self._writers)
        field, write = self._writers[cls]
        return {field: write(value)}

    def read(self, message: Any) -> Any:
        """Return this oneof's value in `message`, or None if it is absent or its type is unknown."""
        field = message.WhichOneof(self._name)
        return None if field is None else self._readers[field](getattr(message, field))

    def read_required(self, message: Any) -> Any:
        value = self.read(message)
        return value if value is not None else _missing(self._name)


def _oneof(hint: Any, oneof: Any, scope: dict[str, Any]) -> tuple[str, str]:
    one = Oneof(hint, oneof)
    scope[f"write_{oneof.name}"], scope[f"read_{oneof.name}"] = one.write, one.read_required
    return f"**write_{oneof.name}(value.{oneof.name})", f"read_{oneof.name}(message)"


def _field(hint: Any, field: Any, scope: dict[str, Any]) -> tuple[str, str]:
    """Return Python source for a field: the dict item that writes it, and the expression that reads it.

    Add to `scope` the objects that the source refers to.
    """
    name = field.name
    hint, constraints = _unwrapped(hint)
    is_optional = get_origin(hint) in (Union, UnionType)
    if is_optional:
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    write, read = _constrained(constraints, name, "{}", "{}", scope)
    if get_origin(hint) is tuple and field.is_repeated:
        write_each, read_each = _value(get_args(hint)[0], field, scope)
        if write_each != "{}":
            write = f"[{write_each.format('each')} for each in {write}]"
        read = f"tuple({read})" if read_each == "{}" else f"tuple([{read_each.format('each')} for each in {read}])"
        return f"{name!r}: {write.format(f'value.{name}')}", read.format(f"message.{name}")
    write_one, read_one = _value(hint, field, scope)
    write, read = write.format(write_one.format(f"value.{name}")), read_one.format(read.format(f"message.{name}"))
    if any(isinstance(constraint, DroppedIfInvalid) for constraint in constraints):
        scope[f"read_{name}"] = _or_none(scope[f"read_{name}"])
    for constraint in constraints:
        if isinstance(constraint, UnknownAs):
            scope[f"member_{name}"].unknown = constraint.member
    if is_optional:
        write = write if write == f"value.{name}" else f"None if value.{name} is None else {write}"
        read = f"{read} if message.HasField({name!r}) else None"
    elif field.message_type is not None:
        read = f"{read} if message.HasField({name!r}) else missing({name!r})"
    return f"{name!r}: {write}", read


def _value(hint: Any, field: Any, scope: dict[str, Any]) -> tuple[str, str]:
    """Return two Python expressions, which write and read a value. In both, {} stands for the value.

    Add to `scope` the objects that the expressions refer to.
    """
    name = field.name
    hint, constraints = _unwrapped(hint)
    if field.message_type is not None:
        if _schema_name(hint) != field.message_type.name:
            raise TypeError(f"{field.full_name} is {field.message_type.name}, not {_schema_name(hint)}")
        codec = compiled(hint, GetMessageClass(field.message_type))
        scope[f"write_{name}"], scope[f"read_{name}"] = codec.fields, codec.read
        return f"write_{name}({{}})", f"read_{name}({{}})"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        numbers = {member: member.value for member in hint}
        if field.enum_type is not None:
            numbers = _numbers(hint, field.enum_type)
            scope[f"number_{name}"] = numbers
        scope[f"member_{name}"] = _Members(name, {number: member for member, number in numbers.items()})
        return "{}" if field.enum_type is None else f"number_{name}[{{}}]", f"member_{name}[{{}}]"
    return _constrained(constraints, name, "{}", "{}", scope, "each_")


def _constrained(
    constraints: Iterable[Any], name: str, write: str, read: str, scope: dict[str, Any], prefix: str = ""
) -> tuple[str, str]:
    for at, constraint in enumerate(constraints):
        key = f"{prefix}constraint_{name}_{at}"
        match constraint:
            case DroppedIfInvalid() | UnknownAs():
                pass
            case Shortened(shorten):
                scope[key] = shorten
                write, read = f"{key}({write})", f"{key}({read})"
            case WireForm(to_wire, from_wire):
                scope[f"write_{key}"], scope[key] = to_wire, from_wire
                write, read = f"write_{key}({write})", f"{key}({read}, {name!r})"
            case check:
                scope[key] = check
                read = f"{key}({read}, {name!r})"
    return write, read


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split a type hint into the bare type and its constraints."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], hint.__metadata__
    return hint, ()


def _schema_name(cls: type[Any]) -> str:
    return CODECS[cls].schema.DESCRIPTOR.name if cls in CODECS else cls.__name__


class _Members(dict[Any, StrEnum]):
    """Enum members by wire value. An unknown value gives `unknown`, or InvalidRequest if `unknown` is None."""

    def __init__(self, field: str, members: Mapping[Any, StrEnum]) -> None:
        super().__init__(members)
        self._field = field
        self.unknown: StrEnum | None = None

    def __missing__(self, value: Any) -> StrEnum:
        if self.unknown is not None and value:  # 0 and an empty text are missing, not unknown
            return self.unknown
        raise InvalidRequest(f"is {value!r}; this version knows {', '.join(map(str, self))}", field=self._field)


def _numbers(enum: type[StrEnum], descriptor: Any) -> dict[StrEnum, Any]:
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", descriptor.name).upper() + "_"
    numbers = {name.removeprefix(prefix): value.number for name, value in descriptor.values_by_name.items()}
    if differing := numbers.keys() ^ {"UNSPECIFIED", *enum.__members__}:
        raise TypeError(f"{enum.__name__} and {descriptor.full_name} differ in {', '.join(sorted(differing))}")
    return {member: numbers[member.name] for member in enum}


def _or_none(read: Callable[[Any], M]) -> Callable[[Any], M | None]:

    def read_or_none(message: Any) -> M | None:
        with suppress(InvalidRequest):
            return read(message)
        return None

    return read_or_none


def _checked(value: Any) -> Any:
    value.check()
    return value


def _missing(field: str) -> Any:
    raise InvalidRequest("is missing", field=field)


# Mapping between refusal classes and gRPC statuses, for both ends. Refusals within messages use the class name.

_STATUS: dict[type[LighthouseError], grpc.StatusCode] = {
    refusals.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    refusals.DuplicateReplica: grpc.StatusCode.ALREADY_EXISTS,
    refusals.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    refusals.Unrecoverable: grpc.StatusCode.DATA_LOSS,  # gRPC itself never uses this status
    refusals.UnknownName: grpc.StatusCode.NOT_FOUND,
    refusals.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    refusals.NotServed: grpc.StatusCode.UNIMPLEMENTED,
    refusals.Superseded: grpc.StatusCode.ABORTED,
    refusals.Drained: grpc.StatusCode.OUT_OF_RANGE,  # gRPC itself never uses this status
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
    """Return the gRPC status for `error`, or INTERNAL if it is not a LighthouseError."""
    return next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), grpc.StatusCode.INTERNAL)


def error_of(status: grpc.StatusCode, details: str | None) -> LighthouseError:
    """Return the exception for a call that failed with a gRPC status. `details` becomes its message."""
    return _CLASS.get(status, refusals.InternalError)(cut_reason(details or status.name.lower().replace("_", " ")))


def kind_of(error: LighthouseError) -> str:
    """Return the name under which a refusal is sent. Indirect subclasses of LighthouseError use their base's name."""
    return next(cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls)


# Codecs of messages in unary calls, or in several streams.


REFUSAL = register_codec(
    LighthouseError,
    refusal_pb2.Refusal,
    lambda error: refusal_pb2.Refusal(kind=kind_of(error), text=cut_reason(str(error))),
    lambda message: _KINDS.get(message.kind, LighthouseError)(cut_reason(message.text)),  # a newer version's kind
)
WORLD = compiled(World, lighthouse_pb2.World)
DISTRUST = compiled(Distrust, lighthouse_pb2.Distrust)
RANK_EVIDENCE = compiled(RankEvidence, evidence_pb2.RankEvidence)
INCIDENT_SUMMARY = compiled(IncidentSummary, incident_pb2.IncidentSummary)
INCIDENT = compiled(Incident, incident_pb2.Incident)
GATHERED = compiled(Gathered, incident_pb2.StacksResponse)
LIGHTHOUSE_STATUS = compiled(LighthouseStatus, lighthouse_pb2.LighthouseStatusResponse)
MANAGER_STATUS = compiled(ManagerStatus, manager_pb2.ManagerStatusResponse)
RUN_STATUS = compiled(RunStatus, run_pb2.RunStatus)
KEYS = compiled(Keys, run_pb2.GetKeysResponse)
FAULT_ORDER = compiled(FaultOrder, chaos_pb2.FaultOrder)
