"""States on offer: the state of the current step, and copies that stay after their step.

`StateOffers` tracks the readers of each state. It can wait for them, or end them by shutting down their connections,
which also wakes a thread that blocks while it sends.
"""

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
    """Identifies a state."""

    quorum_id: int  # the quorum that assigned the readers
    step: int
    group_rank: int

    def __str__(self) -> str:
        return f"quorum {self.quorum_id} step {self.step} group rank {self.group_rank}"


class NotHeldError(Exception):
    """The requested state is not on offer. `held` is the state of the current step, if there is one."""

    def __init__(self, held: StateKey | None) -> None:
        super().__init__(f"held: {held}")
        self.held = held


class CannotBeSentError(Exception):
    """The requested state contains something that cannot be sent. `secret` is the secret of its quorum."""

    def __init__(self, reason: str, secret: str) -> None:
        super().__init__(reason)
        self.secret = secret


class StrangerError(Exception):
    """The reader did not prove that it is a member of the state's quorum."""


@dataclass(slots=True, eq=False)
class StateOffer:
    key: StateKey
    encoding: Encoding
    unread: int | None = None  # bytes to send before a copy is dropped; None for the current state
    secret: str = field(default="", repr=False)  # readers must prove that they know it, unless it is empty
    readers: set[socket.socket] = field(default_factory=set[socket.socket])


class StateOffers:
    """The current state and the copies. Thread safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: StateOffer | None = None
        self._cleared: StateOffer | None = None
        self._kept: dict[StateKey, StateOffer] = {}
        self._refused: tuple[StateKey, str, str] | None = None
        self._settled = (0, -1)
        self._closed = False

    def put(self, key: StateKey, encoding: Encoding, secret: str = "") -> None:
        """Offer this state as the current one. Ends the readers of the current state and waits for them."""
        with self._changed:
            while self._held:
                self.clear()
            self._held = StateOffer(key, encoding, secret=secret)
            self._changed.notify_all()

    def clear(self, grace_s: float = 0.0) -> None:
        """Withdraw the current state. Its readers may finish within `grace_s`, then their connections end.

        When this returns, no thread reads the state.

        Raises:
            TimeoutError: A reader does not end, for example because the device of a tensor hangs.
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
        """Offer a copy in addition, until it was read `reads` times, or until `forget`. It must not change."""
        with self._changed:
            self._kept[key] = StateOffer(key, encoding, reads * encoding.body_length, secret)
            self._changed.notify_all()

    def forget(self, key: StateKey) -> None:
        """Drop a copy and end its readers."""
        with self._changed:
            if (held := self._kept.pop(key, None)) is not None:
                _cut_off(held.readers)

    def settle(self, quorum_id: int, step: int) -> None:
        """Refuse requests up to that quorum and step at once if their state is not on offer. It never will be."""
        with self._changed:
            self._settled = max(self._settled, (quorum_id, step))
            self._changed.notify_all()

    def refuse(self, key: StateKey, reason: str, secret: str = "") -> None:
        """Answer requests for this state by members of its quorum with the reason why it cannot be sent."""
        with self._changed:
            self._refused = key, reason, secret
            self._changed.notify_all()

    def was_read(self, held: StateOffer, count: int) -> None:
        """Record that a reader has received `count` bytes. Drops a copy that was read completely."""
        with self._changed:
            if held.unread is None:
                return
            held.unread -= count
            if held.unread <= 0 and self._kept.get(held.key) is held:
                del self._kept[held.key]

    def cut_off(self) -> None:
        """End the readers of the current state without waiting, even while `clear` waits for them."""
        with self._changed:
            for held in (self._held, self._cleared):
                _cut_off(held.readers if held else set())

    def close(self) -> None:
        """Withdraw everything, and answer the requests that wait for a state."""
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
        """Yield the state under `key` once it is on offer, and count `reader` as its reader while the block runs.

        `may_read` receives the secret of the state, and returns whether the reader has proved that it knows the secret.

        Raises:
            NotHeldError: The state was not offered in time.
            CannotBeSentError: The state cannot be sent.
            StrangerError: The reader must not read it.
        """
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
        """Make waiting requests check whether their connection was cut."""
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
    for reader in readers:
        with suppress(OSError):
            reader.shutdown(socket.SHUT_RDWR)
