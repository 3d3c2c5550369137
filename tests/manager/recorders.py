"""The ports of a manager's driver, which keep what they are given."""

from collections.abc import Callable
from typing import Any

from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse, ToRank, WatchHello
from lighthouse_protocol.refusals import LighthouseError
from manager.group.driver import Watch


class Heard:
    """A rank's end of its watch."""

    def __init__(self) -> None:
        self.messages: list[ToRank] = []
        self.has_ended = False

    def send(self, message: ToRank) -> None:
        self.messages.append(message)

    def end(self, error: LighthouseError | None = None) -> None:
        assert error is None
        self.has_ended = True


class Outcome:
    """A Reply, and what came of the call; None: nothing yet."""

    def __init__(self) -> None:
        self.value: Any = None

    def answer(self, value: object) -> None:
        assert self.value is None, "it has an answer"
        self.value = value

    def refuse(self, error: LighthouseError) -> None:
        self.answer(error)


class Link:
    def __init__(self) -> None:
        self.error = ""
        self.sent: list[ToLighthouse] = []
        self.done: list[str] = []

    def send(self, message: ToLighthouse) -> None:
        self.sent.append(message)

    def give_up(self, reason: str) -> None:
        self.done.append(f"give up: {reason}")

    def connect_second(self, reason: str) -> None:
        self.done.append(f"connect beside: {reason}")

    def cancel_second(self) -> None:
        self.done.append("stay")


class NoEvidence:
    def __init__(self) -> None:
        self.wanted: list[EvidenceRequest] = []

    def add_watch(self, watch: Watch) -> None: ...

    def drop_watch(self, watch: Watch) -> None: ...

    def take_self_report(self, watch: Watch, own: object) -> None: ...

    def collect_evidence(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        self.wanted.append(request)

    def close(self) -> None: ...


def watch(rank: int = 0, peer: Heard | None = None, *, is_local: bool = False, **fields: Any) -> Watch:
    hello = WatchHello(rank, **({"rank_incarnation": f"w{rank}"} | fields))
    return Watch(hello, peer or Heard(), is_local, heard_at=0.0)
