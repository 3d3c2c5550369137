"""What managers without ranks count, and how they step: all members of a quorum together."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.support.referee import Judge, Key
from lighthouse_protocol.messages.membership import Quorum


class Member(Protocol):
    def complete(self) -> None:
        """The step that all were in."""
        ...


@dataclass(slots=True)
class Tally:
    """What has happened since the last report. `messages`: sent to the lighthouse, besides beats; `longest_ack_s`: from
    a beat to its answer; `steps_s`: how long each step took; `revoked_at`: when the last one was told that its quorum
    is revoked (time.monotonic), or 0."""

    beats: int = 0
    messages: int = 0
    commits: int = 0
    discards: int = 0
    revokes: int = 0
    refusals: int = 0
    closings: int = 0
    longest_step_s: float = 0.0
    longest_ack_s: float = 0.0
    revoked_at: float = 0.0
    steps_s: list[float] = field(default_factory=list[float])


class Lockstep:
    """A collective of all participants, as far as they are in this process."""

    judge: Judge
    """Says when one is complete, by complete(); to be set before anybody comes."""

    def __init__(self, on_step: Callable[[float], None]) -> None:
        """`on_step` hears how long each step took."""
        self._on_step = on_step
        self._meetings: dict[Key, set[Member]] = {}
        self._sizes: dict[Key, int] = {}
        self._untold: set[Key] = set()
        self._completed_at = math.inf

    def come(self, manager: Member, quorum: Quorum, step: int) -> None:
        key = (quorum.quorum_id, step)
        self._sizes[key] = len(quorum.participants)
        self._meetings.setdefault(key, set()).add(manager)
        if key not in self._untold:  # once for all that come in this turn of the loop
            self._untold.add(key)
            asyncio.get_running_loop().call_soon(self._tell, key)

    def leave(self, manager: Member) -> None:
        for key in [key for key, meeting in self._meetings.items() if manager in meeting]:
            self._meetings[key].discard(manager)
            self._tell(key)

    def pace(self, step_s: float) -> None:
        self._completed_at = math.inf
        self.judge.pace(step_s)

    def complete(self, key: Key) -> None:
        meeting = self._forget(key)
        now = time.monotonic()
        self._on_step(now - self._completed_at)
        self._completed_at = now
        for manager in meeting:
            manager.complete()

    def _tell(self, key: Key) -> None:
        self._untold.discard(key)
        if key in self._meetings:
            self.judge.tell(key, len(self._meetings[key]), self._sizes[key])
            if not self._meetings[key]:
                self._forget(key)

    def _forget(self, key: Key) -> set[Member]:
        self._sizes.pop(key, None)
        return self._meetings.pop(key, set())
