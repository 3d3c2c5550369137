"""What checkers see of a state machine: each event before the machine handles it, and each effect that it returns."""

import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from types import FunctionType
from typing import Any


class Checks:
    """Checkers of one machine. The base class checks nothing."""

    def before(self, event: Any, now: float) -> None:
        """Look at an event that the machine is about to handle. None is a tick."""

    def after(self, event: Any, effects: Sequence[Any]) -> None:
        """Look at all effects of an event."""
        for effect in effects:
            self.effect(effect)

    def effect(self, effect: Any) -> None:
        """Look at one effect."""

    def deadline(self, due: float | None, *now: float) -> None:
        """Look at the moment at which the machine wants to be called."""


def observe(machine: Any, checks: Checks) -> None:
    """Pass everything that goes in and out of a product machine to `checks`."""
    handle: Callable[[Any, float], Sequence[Any]] = machine.handle
    tick: Callable[[float], Sequence[Any]] = machine.tick
    deadline: Callable[..., float | None] = machine.deadline

    def observed_handle(event: Any, now: float) -> Sequence[Any]:
        checks.before(event, now)
        effects = handle(event, now)
        checks.after(event, effects)
        return effects

    def observed_tick(now: float) -> Sequence[Any]:
        checks.before(None, now)
        effects = tick(now)
        checks.after(None, effects)
        return effects

    def observed_deadline(*now: float) -> float | None:
        due = deadline(*now)
        checks.deadline(due, *now)
        return due

    machine.handle, machine.tick, machine.deadline = observed_handle, observed_tick, observed_deadline


def memory_of(machine: object) -> bytes:
    """Return everything that a machine remembers as bytes, without functions, which include those of `observe`."""
    buffer = BytesIO()
    _Pickler(buffer).dump(machine)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "function" if isinstance(obj, FunctionType) else None
