"""What is on offer: the state of the present step, and copies that outlive theirs; who reads it, how it ends."""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from agent_client.state.codec import Encoding
from agent_client.transfer.connection import DeadlineSocket

ABORT_TIMEOUT_S = 10.0


class StateKey(NamedTuple):
    """Which state: that of one group rank, at one step, for the quorum that assigned its reader."""

    quorum_id: int
    step: int
    group_rank: int

    def __str__(self) -> str:
        return f"quorum {self.quorum_id} step {self.step} group rank {self.group_rank}"


class NotHeldError(Exception):
    """Another state than the one asked for is held, or none."""

    def __init__(self, held: StateKey | None) -> None:
        super().__init__(f"held: {held}")
        self.held = held


class CannotBeSentError(Exception):
    """The state asked for holds something that cannot be sent. `secret`: of its quorum."""

    def __init__(self, reason: str, secret: str) -> None:
        super().__init__(reason)
        self.secret = secret


class StrangerError(Exception):
    """The reader does not prove that it is a member of the quorum that the state was offered in."""


@dataclass(slots=True, eq=False)
class StateOffer:
    """`unread`: bytes of one that is kept that are still to be
    read; None for what was put: `clear` waits for its readers. `secret`: its readers prove that they know it; empty:
    anybody reads it."""

    key: StateKey
    encoding: Encoding
    unread: int | None = None
    secret: str = field(default="", repr=False)
    readers: set[socket.socket] = field(default_factory=set[socket.socket])


class StateOffers:
    """Thread safe. Once `clear` or `put` has returned, nothing reads the state that was put before."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: StateOffer | None = None
        self._cleared: StateOffer | None = None
        self._kept: dict[StateKey, StateOffer] = {}
        self._refused: tuple[StateKey, str, str] | None = None
        self._settled = (0, -1)
        self._closed = False

    def put(self, key: StateKey, encoding: Encoding, secret: str = "") -> None:
        """Hold this one instead of any other, whose readers are cut off first."""
        with self._changed:
            while self._held:
                self.clear()
            self._held = StateOffer(key, encoding, secret=secret)
            self._changed.notify_all()

    def clear(self, grace_s: float = 0.0) -> None:
        """Hold nothing. Readers may finish for `grace_s`, then they are cut off.

        TimeoutError if one of them does not let go: a device that its tensors are on hangs.
        """
        with self._changed:
            held, self._held = self._held, None
            self._cleared = held
            if held and not self._wait(lambda: not held.readers, grace_s):
                _cut_off(held.readers)
                if not self._wait(lambda: not held.readers, ABORT_TIMEOUT_S):
                    raise TimeoutError(f"the state of {held.key} is still being read {ABORT_TIMEOUT_S} s after its end")
            if self._cleared is held:
                self._cleared = None

    def keep(self, key: StateKey, encoding: Encoding, reads: int, secret: str = "") -> None:
        """Hold this one beside all others, until it was read `reads` times, or `forget`. It never changes."""
        with self._changed:
            self._kept[key] = StateOffer(key, encoding, reads * encoding.body_length, secret)
            self._changed.notify_all()

    def forget(self, key: StateKey) -> None:
        """One that was kept; who reads it is cut off."""
        with self._changed:
            if (held := self._kept.pop(key, None)) is not None:
                _cut_off(held.readers)

    def settle(self, quorum_id: int, step: int) -> None:
        """What is not held of that step, or an earlier one, never will be: nobody waits for it."""
        with self._changed:
            self._settled = max(self._settled, (quorum_id, step))
            self._changed.notify_all()

    def refuse(self, key: StateKey, reason: str, secret: str = "") -> None:
        """Answer the members of its quorum that ask for this state with the reason why it cannot be sent."""
        with self._changed:
            self._refused = key, reason, secret
            self._changed.notify_all()

    def was_read(self, held: StateOffer, count: int) -> None:
        """So many bytes of it."""
        with self._changed:
            if held.unread is None:
                return
            held.unread -= count
            if held.unread <= 0 and self._kept.get(held.key) is held:
                del self._kept[held.key]

    def cut_off(self) -> None:
        """End the connections of those who read what was put, also of those whom `clear` waits for. Waits for
        nothing."""
        with self._changed:
            for held in (self._held, self._cleared):
                _cut_off(held.readers if held else set())

    def close(self) -> None:
        """Answer all who wait; hold nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for key in list(self._kept):
                self.forget(key)
        self.clear()

    @contextmanager
    def reading(
        self, key: StateKey, wait_s: float, reader: socket.socket, may_read: Callable[[str], bool] = lambda _: True
    ) -> Generator[StateOffer, None, None]:
        """What is held under `key`, if it is put there within `wait_s`; NotHeldError otherwise. `may_read` is asked
        with the secret of what is held; StrangerError if it may not."""
        held = self._await(key, wait_s, reader, may_read)
        try:
            yield held
        finally:
            with self._changed:
                held.readers.discard(reader)
                self._changed.notify_all()

    def _await(
        self, key: StateKey, wait_s: float, reader: socket.socket, may_read: Callable[[str], bool]
    ) -> StateOffer:
        with self._changed:
            self._wait(lambda: self._closed or self._find(key) or key[:2] <= self._settled or _is_cut(reader), wait_s)
            if (held := self._find(key)) is None:
                if self._refused is None or self._refused[0] != key:
                    raise NotHeldError(self._key())
                _, reason, secret = self._refused
                if secret and not may_read(secret):
                    raise StrangerError
                raise CannotBeSentError(reason, secret)
            if held.secret and not may_read(held.secret):
                raise StrangerError
            held.readers.add(reader)
            return held

    def wake(self) -> None:
        """Have those who wait look at their connections again."""
        with self._changed:
            self._changed.notify_all()

    def _find(self, key: StateKey) -> StateOffer | None:
        return self._held if self._key() == key else self._kept.get(key)

    def _key(self) -> StateKey | None:
        return self._held.key if self._held else None

    def _wait(self, is_done: Callable[[], object], timeout_s: float) -> bool:
        return bool(self._changed.wait_for(is_done, timeout_s))


def _is_cut(reader: socket.socket) -> bool:
    return isinstance(reader, DeadlineSocket) and reader.is_cut


def _cut_off(readers: set[socket.socket]) -> None:
    """End their connections, which also wakes a thread that is blocked while it sends."""
    for reader in readers:
        with suppress(OSError):
            reader.shutdown(socket.SHUT_RDWR)
