"""What managers without ranks count, and how they step: all members of a quorum together."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lighthouse_protocol.messages.membership import Quorum


class Member(Protocol):
    def complete(self) -> None:
        """The step that all were in."""
        ...


@dataclass(slots=True)
class Tally:
    """What has happened since the last report. `messages`: sent to the lighthouse, besides beats; `longest_ack_s`: from
    a beat to its answer; `steps_s`: how long each step took."""

    beats: int = 0
    messages: int = 0
    commits: int = 0
    discards: int = 0
    revokes: int = 0
    refusals: int = 0
    closings: int = 0
    longest_step_s: float = 0.0
    longest_ack_s: float = 0.0
    steps_s: list[float] = field(default_factory=list[float])


class Lockstep:
    """A collective of all participants: it completes `step_s` after the last of them has come; infinite: it rests."""

    def __init__(self, on_step: Callable[[float], None]) -> None:
        """`on_step` hears how long each step took."""
        self.step_s = math.inf
        self._on_step = on_step
        self._meetings: dict[tuple[int, int], set[Member]] = {}
        self._completed_at = math.inf

    def come(self, manager: Member, quorum: Quorum, step: int) -> None:
        key = (quorum.quorum_id, step)
        meeting = self._meetings.setdefault(key, set())
        meeting.add(manager)
        if len(meeting) == len(quorum.participants):
            self._run(key, len(meeting))

    def leave(self, manager: Member) -> None:
        for meeting in self._meetings.values():
            meeting.discard(manager)
        self._meetings = {key: meeting for key, meeting in self._meetings.items() if meeting}

    def pace(self, step_s: float, size: int) -> None:
        self.step_s, self._completed_at = step_s, math.inf
        for key, meeting in list(self._meetings.items()):
            if len(meeting) == size:
                self._run(key, size)

    def _run(self, key: tuple[int, int], size: int) -> None:
        if self.step_s < math.inf:
            asyncio.get_running_loop().call_later(self.step_s, self._complete, key, size)

    def _complete(self, key: tuple[int, int], size: int) -> None:
        meeting = self._meetings.get(key, set())
        if len(meeting) < size:  # somebody has left it: those who still wait will be revoked
            return
        del self._meetings[key]
        now = time.monotonic()
        self._on_step(now - self._completed_at)
        self._completed_at = now
        for manager in meeting:
            manager.complete()
