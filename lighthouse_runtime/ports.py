"""Interfaces of clocks, waiting callers and peers, which tests and simulations implement differently.

An asyncio event loop implements `Timers`.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lighthouse_protocol.refusals import LighthouseError

M = TypeVar("M", contravariant=True)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """A monotonic clock in seconds that can schedule callbacks."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class Reply(Protocol[M]):
    """Answers or refuses a waiting caller's request, once. Further answers and refusals do nothing."""

    def answer(self, value: M) -> None: ...

    def refuse(self, error: LighthouseError) -> None: ...


class Peer(Protocol[M]):
    """The process at the other end of a stream. The methods never block, and do nothing on a closed stream."""

    def send(self, message: M) -> None: ...

    def end(self, error: LighthouseError | None = None) -> None:
        """Send the queued messages, then close the stream, with the status of `error` if given."""
        ...
