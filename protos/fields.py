"""Checks of fields that several messages have. Each returns the value, or raises InvalidRequest with the field."""

import math

from protos.limits import MAX_QUORUM_ID
from protos.refusals import InvalidRequest

MAX_TEXT_CHARS = 512


def check_quorum_id(value: int, field: str = "quorum_id") -> int:
    if not 0 <= value <= MAX_QUORUM_ID:
        raise InvalidRequest(f"is {value}; quorum ids are 0 to {MAX_QUORUM_ID}", field=field)
    return value


def check_count(value: int, field: str) -> int:
    if value < 0:
        raise InvalidRequest(f"is {value}; it counts from 0", field=field)
    return value


def check_number(value: int, field: str) -> int:
    """A count, or a generation's number."""
    if not 0 <= value <= MAX_QUORUM_ID:
        raise InvalidRequest(f"is {value}; it counts from 0 to {MAX_QUORUM_ID}", field=field)
    return value


def check_seconds(value: float, field: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InvalidRequest(f"is {value}; it is a positive number of seconds", field=field)
    return value


def check_short(text: str, field: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    if len(text) > max_chars:
        raise InvalidRequest(f"has {len(text)} characters; at most {max_chars}", field=field)
    return text
