"""The constraints of fields, as types: a message annotates its fields with them, and wire/codec.py applies them.

A check returns the value, or raises InvalidRequest that names the field. `Cut` shortens a value instead, when a message
is written and when it is read. `Form` is a value that looks different on the wire.
"""

import math
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import (
    MAX_COUNT,
    MAX_GROUP_WORLD_SIZE,
    MAX_QUORUM_ID,
    MAX_RESTARTS,
    MAX_SECONDS,
    MAX_SECRET_CHARS,
    MIN_SECRET_CHARS,
    cut_output,
    cut_reason,
)
from lighthouse_protocol.rank_set import RankSet
from lighthouse_protocol.refusals import InvalidRequest

MAX_TEXT_CHARS = 512


def check_quorum_id(value: int, field: str = "quorum_id") -> int:
    if not 0 <= value <= MAX_QUORUM_ID:
        raise InvalidRequest(f"is {value}; quorum ids are 0 to {MAX_QUORUM_ID}", field=field)
    return value


def check_count(value: int, field: str) -> int:
    """Steps too."""
    if not 0 <= value <= MAX_COUNT:
        raise InvalidRequest(f"is {value}; it counts from 0 to {MAX_COUNT}", field=field)
    return value


def check_seconds(value: float, field: str) -> float:
    if not 0 < value <= MAX_SECONDS:
        raise InvalidRequest(f"is {value}; it is a positive number of seconds, at most {MAX_SECONDS:g}", field=field)
    return value


def check_age(value: float, field: str) -> float:
    if not 0 <= value <= MAX_SECONDS:
        raise InvalidRequest(f"is {value}; it is a number of seconds from 0 to {MAX_SECONDS:g}", field=field)
    return value


def check_short(text: str, field: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    if len(text) > max_chars:
        raise InvalidRequest(f"has {len(text)} characters; at most {max_chars}", field=field)
    return text


def check_filled(text: str, field: str) -> str:
    if not text:
        raise InvalidRequest("is empty", field=field)
    return check_short(text, field)


def check_offset(value: float, field: str) -> float:
    if not (math.isfinite(value) and abs(value) <= MAX_SECONDS):
        raise InvalidRequest(f"is {value}; it is a number of seconds", field=field)
    return value


class Between:
    """A whole number from `least` to `most`; `what` says what that is."""

    def __init__(self, least: int, most: int, what: str) -> None:
        self.least = least
        self.most = most
        self._what = what

    def __call__(self, value: int, field: str) -> int:
        if not self.least <= value <= self.most:
            raise InvalidRequest(f"is {value}; {self._what} {self.least} to {self.most}", field=field)
        return value


def check_secret(text: str, field: str) -> str:
    """A refusal does not show it."""
    if not (MIN_SECRET_CHARS <= len(text) <= MAX_SECRET_CHARS and text.isascii() and text.isprintable()):
        raise InvalidRequest(
            f"has {len(text)} characters; a secret has {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS}, printable ASCII ones",
            field=field,
        )
    return text


class Entries:
    """`least` to `most` of them."""

    def __init__(self, most: int, least: int = 0) -> None:
        self.most = most
        self.least = least

    def __call__(self, values: Collection[Any], field: str) -> Any:
        if not self.least <= len(values) <= self.most:
            raise InvalidRequest(f"has {len(values)} entries; {self.least} to {self.most} are allowed", field=field)
        return values


class Chars:
    """Text of at most `most` characters."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, text: str, field: str) -> str:
        return check_short(text, field, self.most)


@dataclass(frozen=True, slots=True)
class Cut:
    shorten: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Form:
    to_wire: Callable[[Any], Any]
    from_wire: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is refused is None instead."""


def ranks_to_bits(ranks: Set[int]) -> bytes:
    """A bit each, that of rank 0 the lowest of the first byte: 65,536 ranks take 8 KiB."""
    return RankSet.of(ranks).to_bytes()


def ranks_from_bits(bits: bytes, field: str) -> RankSet:
    if len(bits) > MAX_GROUP_WORLD_SIZE // 8:
        raise InvalidRequest(f"has {len(bits)} bytes; a group has at most {MAX_GROUP_WORLD_SIZE} ranks", field=field)
    return RankSet.from_bytes(bits)


check_group_rank = Between(0, MAX_GROUP_WORLD_SIZE - 1, "ranks are")

T = TypeVar("T")
Advisory = Annotated[T | None, Dropped()]
"""For a person to see: what this version cannot read of it is no reason to refuse the message."""
Ranks = Annotated[Set[int], Form(ranks_to_bits, ranks_from_bits)]
Secret = Annotated[str, check_secret]
Count = Annotated[int, check_count]
QuorumId = Annotated[int, check_quorum_id]
LastGeneration = Annotated[int, Between(-1, MAX_COUNT, "a generation is, from -1 for none,")]
GroupRank = Annotated[int, check_group_rank]
Slot = Annotated[int, Between(0, MAX_GROUP_WORLD_SIZE - 1, "slots are")]
WorldSize = Annotated[int, Between(1, MAX_GROUP_WORLD_SIZE, "it is")]
Restarts = Annotated[int, Between(0, MAX_RESTARTS, "a budget of restarts is")]
ExitStatus = Annotated[int, Between(-128, 255, "an exit code, or minus a signal, is")]
Port = Annotated[int, Between(1, 65535, "ports are")]
Seconds = Annotated[float, check_seconds]
Age = Annotated[float, check_age]
Offset = Annotated[float, check_offset]
"""Seconds from a moment, before or after it; or a moment since 1970."""
Name = Annotated[str, check_name]
Text = Annotated[str, check_short]
FilledText = Annotated[str, check_filled]
Reason = Annotated[str, Cut(cut_reason)]
Output = Annotated[tuple[str, ...], Cut(cut_output)]
"""The last lines that a process wrote."""
