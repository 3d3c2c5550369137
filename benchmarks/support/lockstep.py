"""Steps of managers without ranks, which all members of a quorum complete together, and their statistics."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lighthouse_protocol.messages.membership import Quorum

Key = tuple[int, int]
"""(quorum_id, step)"""


class Member(Protocol):
    def complete(self) -> None:
        """Complete the step, which all members have reached."""
        ...


@dataclass(slots=True)
class Tally:
    """Events since the last report."""

    beats: int = 0
    messages: int = 0  # to the lighthouse, without heartbeats
    commits: int = 0
    discards: int = 0
    revokes: int = 0
    refusals: int = 0
    closings: int = 0
    longest_step_s: float = 0.0
    longest_ack_s: float = 0.0  # from a heartbeat to its reply
    revoked_at: float = 0.0  # last revoke that a manager has received, by time.monotonic(); 0 without one
    steps_s: list[float] = field(default_factory=list[float])  # duration of each step


class Lockstep:
    """A collective of all participants."""

    def __init__(self, on_step: Callable[[float], None]) -> None:
        """Start with infinitely long steps. `on_step` receives the duration of each step."""
        self._on_step = on_step
        self._step_s = math.inf
        self._meetings: dict[Key, set[Member]] = {}
        self._sizes: dict[Key, int] = {}
        self._completed_at = math.inf

    def come(self, manager: Member, quorum: Quorum, step: int) -> None:
        key = (quorum.quorum_id, step)
        self._sizes[key] = len(quorum.participants)
        self._meetings.setdefault(key, set()).add(manager)
        self._run(key)

    def leave(self, manager: Member) -> None:
        for key, meeting in list(self._meetings.items()):
            meeting.discard(manager)
            if not meeting:
                self._forget(key)

    def pace(self, step_s: float) -> None:
        """Complete each step `step_s` after its last member has arrived, or never if infinite."""
        self._completed_at, self._step_s = math.inf, step_s
        for key in list(self._meetings):
            self._run(key)

    def _run(self, key: Key) -> None:
        if self._step_s < math.inf and self._is_full(key):
            asyncio.get_running_loop().call_later(self._step_s, self._end, key)

    def _is_full(self, key: Key) -> bool:
        return len(self._meetings.get(key, ())) == self._sizes.get(key)

    def _end(self, key: Key) -> None:
        if not self._is_full(key):  # a member has left, so the quorum will be revoked
            return
        meeting = self._forget(key)
        now = time.monotonic()
        self._on_step(now - self._completed_at)
        self._completed_at = now
        for manager in meeting:
            manager.complete()

    def _forget(self, key: Key) -> set[Member]:
        self._sizes.pop(key, None)
        return self._meetings.pop(key, set())
