"""Compiles the writer and the reader of a message, from its dataclass and its protobuf descriptor.

Both have the same field names; the constraints are in the field types (constraints.py). Done once per message, at
import, as generated source code: as fast as code written by hand.
"""

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lighthouse_protocol.constraints import Cut
from lighthouse_protocol.refusals import InvalidRequest

M = TypeVar("M")
P = TypeVar("P", bound=Message)


class Codec(NamedTuple, Generic[M, P]):
    """`read` raises InvalidRequest that names the field; `write` does not check."""

    write: Callable[[M], P]
    read: Callable[[P], M]


def compiled(cls: type[M], schema: type[P]) -> Codec[M, P]:
    """Raises TypeError if the field names of `cls` and `schema` differ.

    A method `fitted` of `cls` returns the message as it fits: it is applied on both ways.
    """
    names = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    differing = names ^ {field.name for field in schema.DESCRIPTOR.fields}
    if differing:
        raise TypeError(f"{cls.__name__} and {schema.DESCRIPTOR.full_name} differ in {', '.join(sorted(differing))}")
    scope: dict[str, Any] = {"cls": cls, "schema": schema}
    hints = get_type_hints(cls, include_extras=True)
    fields = [_field(hints[field.name], field, scope) for field in schema.DESCRIPTOR.fields]
    written = ", ".join(f"{name}={value}" for name, value, _ in fields)
    read = ", ".join(f"{name}={value}" for name, _, value in fields)
    fitted = hasattr(cls, "fitted")
    source = f"""
def write(value):
    {"value = value.fitted()" if fitted else ""}
    return schema({written})

def read(message):
    return cls({read}){".fitted()" if fitted else ""}
"""
    exec(source, scope)
    return Codec(scope["write"], scope["read"])


def _field(hint: Any, field: Any, scope: dict[str, Any]) -> tuple[str, str, str]:
    """Its name, and the expressions that write and read it."""
    name = field.name
    written, read = f"value.{name}", f"message.{name}"
    is_optional = get_origin(hint) in (Union, UnionType)
    if is_optional:
        [hint] = [each for each in get_args(hint) if each is not NoneType]
    if get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple:
        written, read, hint = _cut_list(hint, name, written, read, scope)
        write_one, read_one = _value(hint, field, scope)
        many_written = written if write_one == "{}" else f"[{write_one.format('each')} for each in {written}]"
        many_read = f"tuple({read})" if read_one == "{}" else f"tuple([{read_one.format('each')} for each in {read}])"
        return name, many_written, many_read
    write_one, read_one = _value(hint, field, scope)
    one_written, one_read = write_one.format(written), read_one.format(read)
    if is_optional:
        one_written = f"None if {written} is None else {one_written}"
        one_read = f"{one_read} if message.HasField({name!r}) else None"
    return name, one_written, one_read


def _cut_list(hint: Any, name: str, written: str, read: str, scope: dict[str, Any]) -> tuple[str, str, Any]:
    if get_origin(hint) is Annotated:
        hint, cut = get_args(hint)
        scope[f"cut_{name}"] = cut.shorten
        written, read = f"cut_{name}({written})", f"cut_{name}({read})"
    return written, read, get_args(hint)[0]


def _value(hint: Any, field: Any, scope: dict[str, Any]) -> tuple[str, str]:
    """How one value is written and read; {} stands for it."""
    name, write, read = field.name, "{}", "{}"
    constraints: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *constraints_ = get_args(hint)
        constraints = tuple(constraints_)
    for at, constraint in enumerate(constraints):
        key = f"constraint_{name}_{at}"
        if isinstance(constraint, Cut):
            scope[key] = constraint.shorten
            write, read = f"{key}({write})", f"{key}({read})"
        else:
            scope[key] = constraint
            read = f"{key}({read}, {name!r})"
    if field.message_type is not None:
        codec = compiled(hint, GetMessageClass(field.message_type))
        scope[f"write_{name}"], scope[f"read_{name}"] = codec
        write, read = f"write_{name}({write})", f"read_{name}({read})"
    elif issubclass(hint, StrEnum):
        scope[f"read_{name}"] = _member_of({member.value: member for member in hint}, name)
        read = f"read_{name}({read})"
    return write, read


def _member_of(known: Mapping[str, StrEnum], field: str) -> Callable[[str], StrEnum]:
    def read(value: str) -> StrEnum:
        try:
            return known[value]
        except KeyError:
            raise InvalidRequest(f"is {value!r}; this version knows {', '.join(known)}", field=field) from None

    return read
