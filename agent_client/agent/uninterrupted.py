"""What is done whole: an interruption of a wrapped function comes before it, or after it."""

from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_codes: set[CodeType] = set()


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as it is. It must not wait for anything without a limit."""
    _codes.add(function.__code__)
    return function


def is_uninterrupted(code: CodeType) -> bool:
    return code in _codes
