"""A run in this process: the lighthouse's own driver, streams that are queues, and the client that a session asks for.

Time passes only when something is said.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lighthouse.job.restarts import RunMachine
from lighthouse.job.run_driver import Ports, RunDriver
from lighthouse.job.store import MemoryStore
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import FromRunRank, RankHeartbeat, RankHello, ToRunRank
from lighthouse_protocol.messages.session import Evidence, EvidenceDone, EvidenceRequest
from lighthouse_protocol.refusals import LighthouseError, Unreachable
from tests.lighthouse.peers import NoJobs


class NoTimers:
    """They never fire, and so none is cancelled."""

    time = staticmethod(time.monotonic)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        return threading.Timer(0, callback)

    call_later = call_at


class PeerInside:
    """The run's end of a stream: a queue, closed by None or an error."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[ToRunRank | LighthouseError | None] = queue.SimpleQueue()

    def send(self, message: ToRunRank) -> None:
        self.told.put(message)

    def end(self, error: LighthouseError | None = None) -> None:
        self.told.put(error)


class StreamInside:
    """The rank's end, as lighthouse_runtime.client.streams.RankStream."""

    def __init__(self, run: "RunInside") -> None:
        self._run = run
        self.peer = PeerInside()
        self.session = 0

    def send(self, message: FromRunRank) -> None:
        self._run.hear(self, message)

    def cancel(self, error: LighthouseError | None = None) -> None:
        self._run.end_stream(self)
        self.peer.end(error)

    def __iter__(self) -> Iterator[ToRunRank]:
        while (message := self.peer.told.get()) is not None:
            if isinstance(message, LighthouseError):
                raise message
            yield message


class RunInside:
    """As a LighthouseClient; all under one lock."""

    def __init__(self) -> None:
        machine = RunMachine(now=time.monotonic())
        self._driver = RunDriver(("default", "r"), machine, MemoryStore(), Ports(NoTimers(), lambda: 0.0), NoJobs())
        self._lock = threading.RLock()
        self._streams: set[StreamInside] = set()
        self.steps: dict[int, int] = {}
        self.stopped: list[str] = []

    # -- for a session

    def rank(self) -> StreamInside:
        return StreamInside(self)

    def stop_run(self, reason: str, *, timeout_s: float) -> None:
        self.stopped.append(reason)

    def close(self) -> None:
        pass

    # -- for its streams

    def hear(self, stream: StreamInside, message: FromRunRank) -> None:
        with self._lock:
            if isinstance(message, RankHello):
                self._streams.add(stream)
                stream.session = self._driver.open_rank(message, stream.peer)
            elif stream in self._streams:
                if isinstance(message, RankHeartbeat):
                    self.steps[stream.session] = message.step
                self._driver.receive_from_rank(stream.session, message)

    def end_stream(self, stream: StreamInside) -> None:
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)
                self._driver.end_rank(stream.session)

    # -- for tests

    def stop(self, reason: str) -> None:
        with self._lock:
            self._driver.request_stop(reason, "the test")

    def progress(self) -> list[ProgressSample]:
        """Where each rank is, as the lighthouse knows it."""
        with self._lock:
            return [rank.view.sample for rank in self._driver.ranks()]

    def look(self) -> list[Evidence | EvidenceDone]:
        """What is told of what the ranks do; it grows."""
        told: list[Evidence | EvidenceDone] = []
        with self._lock:
            self._driver.collect_evidence(EvidenceRequest(1), told.append)
        return told

    def lose_streams(self) -> None:
        with self._lock:
            for stream in list(self._streams):
                stream.cancel(Unreachable("the test broke the stream"))
