"""What a driver needs of its surroundings: time, peers, and who waits for an answer.

An asyncio loop is a `Timers`, and so is a virtual clock.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lighthouse_protocol.refusals import LighthouseError

M = TypeVar("M", contravariant=True)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """Monotonic seconds, and calls at a moment or after a delay in them."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class Reply(Protocol[M]):
    """Whoever waits for the answer of one call. The first word counts; neither does anything once nobody waits."""

    def answer(self, value: M) -> None: ...

    def refuse(self, error: LighthouseError) -> None: ...


class Peer(Protocol[M]):
    """The other end of a stream. Neither call waits, and neither does anything after the end."""

    def send(self, message: M) -> None: ...

    def end(self, error: LighthouseError | None = None) -> None:
        """After what was sent, in good order or with `error` as its status. The first end counts."""
        ...
