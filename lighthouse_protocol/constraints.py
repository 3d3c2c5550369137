"""The constraints of fields, as types: a message annotates its fields with them, and wire/codec.py applies them.

A check returns the value, or raises InvalidRequest that names the field. `Cut` shortens a value instead, when a message
is written and when it is read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_COUNT, MAX_GROUP_WORLD_SIZE, MAX_QUORUM_ID, MAX_SECONDS, cut_reason
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


check_number = check_count
"""Of a generation, or a count."""


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


def check_group_rank(value: int, field: str = "group_rank") -> int:
    if not 0 <= value < MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {value}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field=field)
    return value


def check_offset(value: float, field: str) -> float:
    if not (math.isfinite(value) and abs(value) <= MAX_SECONDS):
        raise InvalidRequest(f"is {value}; it is a number of seconds", field=field)
    return value


@dataclass(frozen=True, slots=True)
class Cut:
    shorten: Callable[[Any], Any]


Count = Annotated[int, check_count]
QuorumId = Annotated[int, check_quorum_id]
GroupRank = Annotated[int, check_group_rank]
Age = Annotated[float, check_age]
Offset = Annotated[float, check_offset]
"""Seconds from a moment, before or after it; or a moment since 1970."""
Name = Annotated[str, check_name]
Text = Annotated[str, check_short]
Reason = Annotated[str, Cut(cut_reason)]
