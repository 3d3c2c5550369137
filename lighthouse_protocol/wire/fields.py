"""Checks of fields that several messages have. Each returns the value, or raises InvalidRequest with the field."""

from lighthouse_protocol.limits import MAX_COUNT, MAX_QUORUM_ID, MAX_SECONDS
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
