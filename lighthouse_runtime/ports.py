"""Interfaces of a driver's surroundings: time, callers and peers.

An asyncio loop is a `Timers`, and so is a virtual clock.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lighthouse_protocol.refusals import LighthouseError

M = TypeVar("M", contravariant=True)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """A monotonic clock in seconds, and calls scheduled by it."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class Reply(Protocol[M]):
    """A caller that waits for one answer. The first answer or refusal counts; later ones do nothing."""

    def answer(self, value: M) -> None: ...

    def refuse(self, error: LighthouseError) -> None: ...


class Peer(Protocol[M]):
    """The other end of a stream. Calls never wait, and do nothing after the end."""

    def send(self, message: M) -> None: ...

    def end(self, error: LighthouseError | None = None) -> None:
        """End the stream after the messages already sent, with `error` as its status if given. The first end counts."""
        ...
