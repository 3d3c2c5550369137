"""Those at the other end of a stream or a call, who only listen."""

from typing import Generic, TypeVar

from lighthouse_protocol.refusals import LighthouseError

T = TypeVar("T")


class Listener:
    """A Peer."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.is_ended = False
        self.error: LighthouseError | None = None

    def send(self, message: object) -> None:
        self.messages.append(message)

    def end(self, error: LighthouseError | None = None) -> None:
        self.is_ended, self.error = True, error


class Caller(Generic[T]):
    """A Reply."""

    def __init__(self) -> None:
        self.answers: list[T] = []
        self.errors: list[LighthouseError] = []

    def answer(self, value: T) -> None:
        self.answers.append(value)

    def refuse(self, error: LighthouseError) -> None:
        self.errors.append(error)
