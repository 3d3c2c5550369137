"""The manager's connection to the lighthouse: one session, opened again for as long as the manager runs."""

import asyncio
import logging
import random
from collections.abc import Callable

from lighthouse_runtime.clients import AsyncLighthouseClient
from lighthouse_runtime.streams import Session
from protos.refusals import LighthouseError, Superseded, Unreachable
from protos.session import Leave, Refused, ToLighthouse, ToManager

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5


class Backoff:
    """Grows from FIRST_BACKOFF_S to MAX_BACKOFF_S, with jitter."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    async def wait(self) -> None:
        delay = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(MAX_BACKOFF_S, 2 * self._next_s)
        await asyncio.sleep(delay)


class LighthouseLink:
    """`connect` makes a client; each attempt has a connection of its own, so that none waits for another's back-off."""

    def __init__(self, connect: Callable[[], AsyncLighthouseClient], address: str) -> None:
        self.address = address
        self.error = "not connected yet"
        self._connect = connect
        self._session: Session | None = None
        self._was_reachable: bool | None = None
        self._is_leaving = False

    @property
    def is_reachable(self) -> bool:
        """It answers, if only to refuse this group; `error` says why."""
        return self._was_reachable is True

    async def run(
        self, opened: Callable[[], None], received: Callable[[ToManager], None], closed: Callable[[], None]
    ) -> None:
        """Sessions, one after the other, until cancelled, or the group has left in good order."""
        backoff = Backoff()
        while True:
            async with self._connect() as client, client.session() as session:
                self._session = session
                opened()
                try:
                    async for message in session:
                        if self.error:
                            self._note("")
                            backoff.reset()
                        received(message)
                    if self._is_leaving:
                        return self._note_end()
                    self._note(f"{self.address} has ended the session")
                except LighthouseError as e:
                    is_refused = not isinstance(e, Unreachable | Superseded)
                    self._note(str(e), is_reachable=is_refused)
                    if is_refused:
                        received(Refused(0, e))
                finally:
                    self._session = None
                    closed()
            await backoff.wait()

    def send(self, message: ToLighthouse) -> None:
        self._is_leaving |= isinstance(message, Leave)
        if self._session is not None:
            self._session.send(message)

    def give_up(self, reason: str) -> None:
        """End this connection; the next one is made at once."""
        if self._session is not None:
            self._session.cancel(Unreachable(f"{self.address} is unreachable: {reason}"))

    def _note(self, error: str, *, is_reachable: bool = False) -> None:
        if error and error != self.error:
            log.warning("%s: %s", "the lighthouse refuses" if is_reachable else "lighthouse lost", error)
        elif not error and self.error:
            log.info("lighthouse at %s answers", self.address)
        self._was_reachable = is_reachable or not error
        self.error = error

    def _note_end(self) -> None:
        self._was_reachable, self.error = False, "this replica group has left"
