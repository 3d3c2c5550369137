"""A run without a lighthouse: its own machine, and streams that are queues. For tests of the ranks' side."""

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from lighthouse.runs.rules import events
from lighthouse.runs.rules.machine import RunMachine
from lighthouse_protocol.messages.run import (
    FromRunRank,
    GenerationEnded,
    GenerationFormed,
    HelloRejected,
    RankHeartbeat,
    RankHello,
    RankId,
    RankWelcome,
    RunCompleted,
    ToRunRank,
)
from lighthouse_protocol.refusals import LighthouseError, Unreachable


def event_of(rank: RankId, message: FromRunRank, session: int) -> events.Event:
    if isinstance(message, RankHello):
        return events.RankJoined(message, session)
    return events.RankSaid(rank, message)


def told_by(effect: events.Effect) -> list[tuple[RankId, ToRunRank]]:
    """What an effect says, and to whom."""
    match effect:
        case events.GenerationFormed(generation, spares):
            told = GenerationFormed(generation.counters, tuple(rank.slot for rank in generation.active))
            return [(rank, told) for rank in (*generation.active, *spares)]
        case events.GenerationTold(rank, generation):
            return [(rank, GenerationFormed(generation.counters, tuple(rank.slot for rank in generation.active)))]
        case events.Interrupted(number, reason, ranks):
            return [(rank, GenerationEnded(number, reason)) for rank in ranks]
        case events.RankRefused(rank, error):
            return [(rank, HelloRejected(error))]
        case events.Completed(number, ranks):
            return [(rank, RunCompleted(number)) for rank in ranks]
        case events.Stopped(stop, ranks):
            return [(rank, stop) for rank in ranks]
        case _:
            return []


class StreamInside:
    """One rank's stream, as lighthouse_runtime.client.streams.RankStream."""

    def __init__(self, run: "RunInside", session: int) -> None:
        self._run = run
        self.session = session
        self.rank: RankId | None = None
        self._said: queue.SimpleQueue[ToRunRank | LighthouseError | None] = queue.SimpleQueue()
        self.is_open = True

    def send(self, message: FromRunRank) -> None:
        if isinstance(message, RankHello):
            self.rank = message.rank
        self._run.hear(self, message)

    def tell(self, message: ToRunRank | LighthouseError) -> None:
        self._said.put(message)

    def cancel(self) -> None:
        self._run.close(self)
        self._said.put(None)

    def __iter__(self) -> Iterator[ToRunRank]:
        while (message := self._said.get()) is not None:
            if isinstance(message, LighthouseError):
                raise message
            yield message


class RunInside:
    """All under one lock; time passes only when something is said."""

    def __init__(self) -> None:
        self.client: Any = None
        self.machine = RunMachine(now=time.monotonic())
        self.is_reachable = True
        self.formed: list[events.GenerationFormed] = []
        self.steps: dict[int, int] = {}
        self._lock = threading.RLock()
        self._sessions = itertools.count(1)
        self._streams: dict[int, StreamInside] = {}

    def open(self) -> StreamInside:
        with self._lock:
            stream = StreamInside(self, next(self._sessions))
            self._streams[stream.session] = stream
            if not self.is_reachable:
                self._break(stream)
            return stream

    def hear(self, stream: StreamInside, message: FromRunRank) -> None:
        with self._lock:
            if stream.is_open and stream.rank is not None:
                if isinstance(message, RankHeartbeat):
                    self.steps[stream.rank.slot] = message.step
                self.do(event_of(stream.rank, message, stream.session))
                if isinstance(message, RankHello):
                    stream.tell(RankWelcome())

    def close(self, stream: StreamInside) -> None:
        with self._lock:
            if stream.is_open:
                stream.is_open = False
                del self._streams[stream.session]
                self.do(events.SessionEnded(stream.session))

    def do(self, event: events.Event) -> None:
        with self._lock:
            for effect in self.machine.handle(event, time.monotonic()):
                if isinstance(effect, events.GenerationFormed):
                    self.formed.append(effect)
                for rank, message in told_by(effect):
                    for stream in self._streams.values():
                        if stream.rank == rank:
                            stream.tell(message)

    def stop(self, reason: str) -> None:
        self.do(events.StopAsked(reason, "the test"))

    def lose_streams(self) -> None:
        with self._lock:
            for stream in list(self._streams.values()):
                self._break(stream)

    def _break(self, stream: StreamInside) -> None:
        self.close(stream)
        stream.tell(Unreachable("the test broke the stream"))
