"""Assignments, as a manager tells them to its ranks."""

from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from lighthouse_protocol.messages.membership import Assignment


def assignment(at: int = 0, groups: int = 2, **changes: Any) -> Assignment:
    """Of the replica group `at` in quorum 7 of a, b ..., all of them at step 5."""
    names = tuple(ascii_lowercase[:groups])
    plain = Assignment(7, at, groups, names, "127.0.0.1:1", 5, at, groups, groups, "a:1", place=at)
    return replace(plain, **changes)
