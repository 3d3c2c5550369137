"""A manager's end of a watch, as the test has it."""

import queue
import threading
from collections.abc import Callable, Iterator

from lighthouse_protocol.messages.incident import SelfReport
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.session import FromRank, Leaving, Released, ToRank, Vote, WatchOpened
from lighthouse_protocol.refusals import LighthouseError, Unreachable
from tests.processes import PATIENCE_S


class FakeWatch:
    """Says what the test puts into `says`; an error ends it. `repeated` has what is to be sent, and how often;
    `reports` what was said of the rank."""

    def __init__(self, *tells: ToRank) -> None:
        self.says: queue.SimpleQueue[ToRank | LighthouseError] = queue.SimpleQueue()
        for told in (WatchOpened(), *tells):
            self.says.put(told)
        self.heard: queue.SimpleQueue[Vote] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[ProgressSample | SelfReport] = queue.SimpleQueue()
        self.is_cancelled = threading.Event()
        self.repeated: list[tuple[Callable[[], ProgressSample | None], float]] = []

    def send(self, message: FromRank) -> None:
        if isinstance(message, Vote):
            self.heard.put(message)
        elif isinstance(message, ProgressSample | SelfReport):
            self.reports.put(message)
        else:
            assert isinstance(message, Leaving)
            self.says.put(Released())

    def repeat(self, say: Callable[[], ProgressSample | None], every_s: float) -> None:
        self.repeated.append((say, every_s))

    def repeat_now(self) -> None:
        for say, _ in self.repeated:
            if (sample := say()) is not None:
                self.reports.put(sample)

    def ballot(self) -> Vote:
        return self.heard.get(timeout=PATIENCE_S)

    def end(self) -> None:
        self.says.put(Unreachable("ended"))

    def cancel(self) -> None:
        self.is_cancelled.set()
        self.says.put(Unreachable("cancelled"))

    def __iter__(self) -> Iterator[ToRank]:
        while not isinstance(said := self.says.get(timeout=PATIENCE_S), LighthouseError):
            yield said
        raise said
