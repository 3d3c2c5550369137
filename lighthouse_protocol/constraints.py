"""Constraints on message fields, as annotated types.

Messages annotate their fields with these types, and wire/codec.py applies the constraints. A check returns the value or
raises InvalidRequest, which names the field. `Shortened` truncates a value on write and on read. `WireForm` converts
between a field's type in Python and its type on the wire. `UnknownAs` lets old versions read new enum values.
"""

import math
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from enum import StrEnum
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


def cap_age(value: float) -> float:
    """Return the valid age that is closest to `value`. A sum of valid ages may be too large for the reader."""
    return min(max(value, 0.0), MAX_SECONDS)


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


def cap_offset(value: float) -> float:
    return min(max(value, -MAX_SECONDS), MAX_SECONDS)


class IntRange:
    """Constraint that an integer is in a range.

    `what` introduces the range in error messages, as "ranks are" does in "is 9; ranks are 0 to 7".
    """

    def __init__(self, least: int, most: int, what: str) -> None:
        self.least = least
        self.most = most
        self._what = what

    def __call__(self, value: int, field: str) -> int:
        if not self.least <= value <= self.most:
            raise InvalidRequest(f"is {value}; {self._what} {self.least} to {self.most}", field=field)
        return value


def check_secret(text: str, field: str) -> str:
    """Return `text` if its length and characters are valid. Otherwise raise InvalidRequest, which omits the secret."""
    if not (MIN_SECRET_CHARS <= len(text) <= MAX_SECRET_CHARS and text.isascii() and text.isprintable()):
        raise InvalidRequest(
            f"has {len(text)} characters; a secret has {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS}, printable ASCII ones",
            field=field,
        )
    return text


class EntryCount:
    def __init__(self, most: int, least: int = 0) -> None:
        self.most = most
        self.least = least

    def __call__(self, values: Collection[Any], field: str) -> Any:
        if not self.least <= len(values) <= self.most:
            raise InvalidRequest(f"has {len(values)} entries; {self.least} to {self.most} are allowed", field=field)
        return values


class MaxChars:
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, text: str, field: str) -> str:
        return check_short(text, field, self.most)


@dataclass(frozen=True, slots=True)
class Shortened:
    shorten: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class WireForm:
    to_wire: Callable[[Any], Any]
    from_wire: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class DroppedIfInvalid:
    """Annotation for a field that is read as None if its value is invalid, so that the message itself stays valid."""


@dataclass(frozen=True, slots=True)
class UnknownAs:
    """Annotation for an enum field. A value that this version does not know is read as `member`."""

    member: StrEnum


def ranks_to_bits(ranks: Set[int]) -> bytes:
    """Encode ranks as a bit mask. Rank 0 is the lowest bit of the first byte; 65,536 ranks take 8 KiB."""
    return RankSet.of(ranks).to_bytes()


def ranks_from_bits(bits: bytes, field: str) -> RankSet:
    if len(bits) > MAX_GROUP_WORLD_SIZE // 8:
        raise InvalidRequest(f"has {len(bits)} bytes; a group has at most {MAX_GROUP_WORLD_SIZE} ranks", field=field)
    return RankSet.from_bytes(bits)


check_group_rank = IntRange(0, MAX_GROUP_WORLD_SIZE - 1, "ranks are")

T = TypeVar("T")
# A field for display. The message stays valid if this version cannot read the field.
Advisory = Annotated[T | None, DroppedIfInvalid()]
Ranks = Annotated[Set[int], WireForm(ranks_to_bits, ranks_from_bits)]
Secret = Annotated[str, check_secret]
Count = Annotated[int, check_count]
QuorumId = Annotated[int, check_quorum_id]
LastGeneration = Annotated[int, IntRange(-1, MAX_COUNT, "a generation is, from -1 for none,")]
GroupRank = Annotated[int, check_group_rank]
Slot = Annotated[int, IntRange(0, MAX_GROUP_WORLD_SIZE - 1, "slots are")]
WorldSize = Annotated[int, IntRange(1, MAX_GROUP_WORLD_SIZE, "it is")]
Restarts = Annotated[int, IntRange(0, MAX_RESTARTS, "a budget of restarts is")]
ExitStatus = Annotated[int, IntRange(-128, 255, "an exit code, or minus a signal, is")]
Port = Annotated[int, IntRange(1, 65535, "ports are")]
Seconds = Annotated[float, check_seconds]
Age = Annotated[float, WireForm(cap_age, check_age)]
Offset = Annotated[float, WireForm(cap_offset, check_offset)]  # seconds before or after a moment, or a Unix time
Name = Annotated[str, check_name]
Text = Annotated[str, check_short]
FilledText = Annotated[str, check_filled]
Reason = Annotated[str, Shortened(cut_reason)]
Output = Annotated[tuple[str, ...], Shortened(cut_output)]  # the last lines that a process wrote
