"""The manager's connection to the lighthouse.

`LighthouseLink` opens a new session whenever one ends, until the group has left. It chooses the lighthouse if there are
several, and can move the session to a second connection if the first one is silent (see session.py). `UnreachableLog`
limits how often an unreachable lighthouse is logged.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import Callable

from lighthouse_protocol.coordinator import LeaderSearch
from lighthouse_protocol.messages.session import JoinRejected, Leave, ToLighthouse, ToManager, Welcome
from lighthouse_protocol.refusals import (
    LighthouseError,
    NotLeader,
    NotServed,
    Superseded,
    Unreachable,
    WrongProtocol,
)
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.clients import AsyncLighthouseClient
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.loop import start_part
from lighthouse_runtime.timing.pacing import Backoff

log = logging.getLogger(__name__)


REMIND_S = 10.0
MAX_REMIND_S = 60.0
MAX_REASONS = 64
_DURATION = re.compile(r"\d+ s\b")
FIRST_TRY_S = 0.5


class UnreachableLog:
    """Limits how often an unreachable lighthouse is logged.

    Each new reason is logged immediately. Known reasons are logged again after REMIND_S, then at intervals that double
    up to MAX_REMIND_S. Several lighthouses may give different reasons in turn. Reasons that differ only in a duration
    count as one.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()  # logged since the last success, without durations
        self._since = 0.0
        self._remind_at = 0.0
        self._remind_s = REMIND_S

    def next_line(self, error: str, now: float) -> str:
        """Return the line to log for a failed attempt, or an empty string if nothing should be logged."""
        if not self._reasons:
            self._since, self._remind_s = now, REMIND_S
        reason = _DURATION.sub("", error)
        is_repeated = reason in self._reasons or len(self._reasons) >= MAX_REASONS
        if is_repeated and now < self._remind_at:
            return ""
        if not is_repeated:
            self._reasons.add(reason)
        else:
            self._remind_s = min(MAX_REMIND_S, 2 * self._remind_s)
        self._remind_at = now + self._remind_s
        return f"{error}; for {now - self._since:.0f} s now" if is_repeated else error

    def clear_error(self) -> None:
        self._reasons.clear()


class _Connection:
    """Connection to the lighthouse, and the session that it carries."""

    def __init__(self, client: AsyncLighthouseClient, on_message: "Callable[[_Connection, ToManager], None]") -> None:
        self.client = client
        self.session = client.session()
        self.successor: asyncio.Future[AsyncLighthouseClient] = asyncio.get_running_loop().create_future()
        """Future that completes with the client of the connection to which the session moves."""

        self.over = asyncio.create_task(self._read(on_message))
        """Task that completes at the end of the session, with the error or None."""

    async def _read(self, on_message: "Callable[[_Connection, ToManager], None]") -> LighthouseError | None:
        try:
            async with self.client, self.session as session:
                async for message in session:
                    on_message(self, message)
        except LighthouseError as e:
            return e
        return None


class LighthouseLink:
    """Runs sessions with the lighthouse, one at a time.

    A session may move to a second connection. The first connection closes only after the lighthouse has accepted the
    second. If the first closed earlier, the lighthouse would consider this group lost. `connect` creates a client for
    the address that `search` selects. Each client has a separate connection, so no attempt waits for another's backoff.
    """

    def __init__(self, connect: Callable[[], AsyncLighthouseClient], search: LeaderSearch) -> None:
        self._search = search
        self.error = "not connected yet"
        self._connect = connect
        self._connection: _Connection | None = None
        self._abandoned: set[_Connection] = set()  # connections whose sessions have moved; closed at the next welcome
        self._closing: set[_Connection] = set()
        self._second: asyncio.Task[None] | None = None
        self._was_reachable: bool | None = None
        self._is_leaving = False
        self._has_answered = False
        self._unreachable_log = UnreachableLog()

    @property
    def address(self) -> str:
        """Address of the current lighthouse."""
        return str(self._search.address)

    @property
    def is_reachable(self) -> bool:
        """True if the lighthouse answers. It may still refuse the group, in which case `error` has the reason."""
        return self._was_reachable is True

    async def run(
        self, opened: Callable[[], None], received: Callable[[ToManager], None], closed: Callable[[bool], None]
    ) -> None:
        """Run sessions until cancelled, or until the group has left the job.

        Args:
            opened: Called at the start of each session.
            received: Called with each message, and with JoinRejected(0, error) if the lighthouse refuses the session.
            closed: Called at the end of each session. The argument is True if it moves to another connection.

        Raises:
            WrongProtocol: Only one address is configured, and the server there is not a lighthouse. Not raised once a
                lighthouse has answered there, because another process may be using its port temporarily.
            NotServed: Only one address is configured, and its server offers no sessions. Not raised once a lighthouse
                has answered there, either.
        """
        backoff = Backoff()
        waits = True

        def on_message(connection: _Connection, message: ToManager) -> None:
            if connection is not self._connection:
                return
            if self.error:
                self._set_error("")
                backoff.reset()
            self._search.mark_served()
            self._has_answered = True
            if isinstance(message, Welcome):
                self._close_abandoned()
            received(message)

        client: AsyncLighthouseClient | None = None
        try:
            while True:
                connection = self._connection = _Connection(client or self._connect(), on_message)
                client = None
                opened()
                try:
                    await asyncio.wait((connection.over, connection.successor), return_when=asyncio.FIRST_COMPLETED)
                    self.cancel_second()
                    if connection.successor.done():
                        client = connection.successor.result()
                    else:
                        error = connection.over.result()
                        may_recover = self._has_answered or self._search.has_choice
                        if isinstance(error, WrongProtocol | NotServed) and not may_recover:
                            raise error
                        if error is None and self._is_leaving:
                            self._was_reachable, self.error = False, "this replica group has left its job"
                            return
                        is_refused = error is not None and not isinstance(error, Unreachable | Superseded)
                        text = str(error or f"{connection.client.address} closed the session")
                        waits = self._search.mark_failed(error or Unreachable(text))
                        if waits or not isinstance(error, NotLeader):  # a redirect by a follower is not a failure
                            self._set_error(text, is_reachable=is_refused)
                        if error is not None and is_refused:
                            received(JoinRejected(0, error))
                finally:
                    if not connection.over.done():
                        self._abandoned.add(connection)
                    self._connection = None
                    closed(client is not None)
                if client is None:
                    if waits:
                        await backoff.wait()
                elif not connection.client.is_connected:  # its queued messages must not reach the lighthouse later
                    connection.session.cancel()
        finally:
            self.cancel_second()
            self._close_abandoned()
            await asyncio.gather(*(connection.over for connection in self._closing), return_exceptions=True)

    def send(self, message: ToLighthouse) -> None:
        self._is_leaving |= isinstance(message, Leave)
        if self._connection is not None:
            self._connection.session.send(message)

    def give_up(self, reason: str) -> None:
        """Close the connection because of `reason`, and open a new one."""
        if self._connection is not None:
            self._connection.session.cancel(Unreachable(f"{self.address} is unreachable: {reason}"))

    def connect_second(self, reason: str) -> None:
        """Open a second connection, because the first may be broken, and move the session to it. Log `reason`."""
        if self._connection is not None and (self._second is None or self._has_second_failed):
            log.info(
                "%s: %s; opening a second connection",
                self.address,
                reason,
                extra=event("lighthouse_silent", lighthouse=self.address),
            )
            work = self._open_second(self._connection.successor)
            self._second = start_part(work, "the attempt to open a second connection", None)

    @property
    def _has_second_failed(self) -> bool:
        second = self._second
        return second is not None and second.done() and (second.cancelled() or second.exception() is not None)

    def cancel_second(self) -> None:
        """Cancel the attempt to open a second connection."""
        second, self._second = self._second, None
        if second is not None:
            second.cancel()

    async def _open_second(self, found: "asyncio.Future[AsyncLighthouseClient]") -> None:
        backoff = Backoff()
        for tries in itertools.count():
            client = self._connect()
            try:
                await client.connect(FIRST_TRY_S * 2 ** min(tries, 2))
                if self._search.has_choice and not await client.invoke(rpcs.is_serving(timeout_s=FIRST_TRY_S)):
                    raise NotLeader(f"{client.address} does not lead")
            except LighthouseError as e:
                await client.close()
                if self._search.mark_failed(e):
                    await backoff.wait()
            except BaseException:
                await client.close()
                raise
            else:
                found.set_result(client)
                return

    def _close_abandoned(self) -> None:
        """Close the connections whose sessions have moved."""
        for connection in self._abandoned:
            connection.session.cancel()
        self._closing = {connection for connection in self._closing | self._abandoned if not connection.over.done()}
        self._abandoned = set()

    def _set_error(self, error: str, *, is_reachable: bool = False) -> None:
        if error:
            if text := self._unreachable_log.next_line(error, asyncio.get_running_loop().time()):
                what, name = (
                    ("refused by the lighthouse", "refused") if is_reachable else ("lighthouse unreachable", "lost")
                )
                log.warning("%s: %s", what, text, extra=event(f"lighthouse_{name}", lighthouse=self.address))
        elif self.error:
            self._unreachable_log.clear_error()
            fields = event("lighthouse_answers", lighthouse=self.address)
            log.info("connected to the lighthouse at %s", self.address, extra=fields)
        self._was_reachable = is_reachable or not error
        self.error = error
