"""A call of a handler that waits on the loop."""

import asyncio
from typing import Generic, TypeVar

from lighthouse_protocol.refusals import LighthouseError

T = TypeVar("T")


class FutureReply(Generic[T]):
    """A lighthouse_runtime.ports.Reply. `value` is what to await; it raises the refusal."""

    def __init__(self) -> None:
        self.value: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def answer(self, value: T) -> None:
        if not self.value.done():
            self.value.set_result(value)

    def refuse(self, error: LighthouseError) -> None:
        if not self.value.done():
            self.value.set_exception(error)
            self.value.exception()  # whoever has gone away does not ask for it any more
