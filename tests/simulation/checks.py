"""The checks see each event of a machine before it is handled, and then what it amounts to."""

import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from types import FunctionType
from typing import Any, Protocol


class Checks(Protocol):
    def handles(self, event: Any) -> None: ...

    def answers(self, effect: Any) -> None: ...


def observe(machine: Any, checks: Checks) -> None:
    """Of a product machine: its `handle(event, now)` and `tick(now)`."""
    handle: Callable[[Any, float], Sequence[Any]] = machine.handle
    tick: Callable[[float], Sequence[Any]] = machine.tick

    def observed_handle(event: Any, now: float) -> Sequence[Any]:
        checks.handles(event)
        return answered(handle(event, now))

    def observed_tick(now: float) -> Sequence[Any]:
        return answered(tick(now))

    def answered(effects: Sequence[Any]) -> Sequence[Any]:
        for effect in effects:
            checks.answers(effect)
        return effects

    machine.handle, machine.tick = observed_handle, observed_tick


def memory_of(machine: object) -> bytes:
    """All that it remembers, as bytes; functions left out, ours among them."""
    buffer = BytesIO()
    _Pickler(buffer).dump(machine)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "function" if isinstance(obj, FunctionType) else None
