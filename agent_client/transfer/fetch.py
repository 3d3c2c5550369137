"""The target's side of server.py. From several sources at once where these can (striped.py); else from one after the
other: rules/source_order.py decides what to read next, this reads it. Errors name every source."""

import http.client
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from agent_client.state.codec import Encoding, decode
from agent_client.state.snapshot import StateMismatch
from agent_client.state.tree import CorruptState, State
from agent_client.transfer.connection import Pace, StateRefused, StateUnavailable, check_begin, check_rest
from agent_client.transfer.offers import StateKey
from agent_client.transfer.rules.source_order import Broken, Failed, Read, Refused, SourceOrder
from agent_client.transfer.striped import (
    WAIT_SHARE,
    Connection,
    FindAddress,
    OnBytes,
    OtherTargets,
    Requests,
    StripedFetch,
    key_path,
)
from lighthouse_protocol.refusals import LighthouseError

log = logging.getLogger(__name__)

__all__ = ["Fetch", "FindAddress", "OnBytes", "OtherTargets"]


class Fetch:
    """One transfer of the state under `key`, its tensors on the CPU: what the first of `sources` has that can give it.

    `sources`: name to what finds its address (http://host:port), in the order in which they are asked. `accept` raises
    StateMismatch for a state that does not fit; the next source is asked then. `silence_s`: how long a source may send
    nothing while there is another; `wait_s`: how long it may wait for that key to be published, by default most of its
    time. `timeout_s` bounds all but the resolution of host names. `gives_way`: nobody waits for it (priority.py), and
    one source is read at a time.
    `secret`: of the quorum; source and target prove to each other that they know it. Empty: neither does.
    `on_received` is told of all that arrives. `others`: that receive the same state meanwhile. `own`: a state that may
    be that one already; pieces that it has are not read.
    """

    def __init__(
        self,
        sources: Mapping[str, FindAddress],
        key: tuple[int, int, int],
        timeout_s: float,
        *,
        accept: Callable[[State], object],
        expect: Callable[[State], object] | None = None,
        silence_s: float | None = None,
        wait_s: float | None = None,
        max_bytes: int | None = None,
        gives_way: bool = False,
        secret: str = "",
        on_received: OnBytes = lambda source, received, total: None,
        others: OtherTargets | None = None,
        own: Encoding | None = None,
    ) -> None:
        self._others, self._own = others, own
        self._on_received = on_received
        self._sources = sources
        self._key = StateKey(*key)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._requests = Requests(self._key, self._deadline, secret)
        self._accept, self._expect = accept, expect
        self._wait_s = wait_s
        self._max_bytes = max_bytes
        self._gives_way = gives_way
        self._pace: Pace | None = None
        self._silence_s = silence_s or timeout_s
        self._machine = self._order(list(sources))
        self._kinds: list[type[Exception]] = []
        self._difference = ""
        self._connection: Connection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._length = self._received = 0
        self._source = self._tag = ""

    def run(self) -> State:
        """Raises TimeoutError, StateUnavailable (ask the next quorum for a source), or, where each source failed in
        the same way, what `accept` raised, CorruptState, or ValueError for a malformed address. Nothing is used then.
        """
        self._pace = Pace() if self._gives_way else None
        if (len(self._sources) > 1 or self._others or self._own) and not self._gives_way:
            striped = self._stripes()
            if (state := striped.run()) is not None:
                return state
            self._machine = self._order(sorted(self._sources, key=striped.failed.__contains__))
        action = self._machine.begin(time.monotonic())
        while isinstance(action, Read):
            try:
                return self._attempt(action)
            except _Next as next_:
                action = next_.action
            finally:
                self._hang_up()
        raise self._failure(action)

    def cancel(self, reason: str) -> None:
        """From any thread: `run` raises StateUnavailable at once."""
        self._requests.cancel(reason)

    def readinto(self, buffer: memoryview, /) -> int:
        """The next bytes of the state, over a new connection where the old one broke."""
        while True:
            try:
                with self._judging():
                    return self._receive(buffer)
            except _Next as next_:
                self._resume(next_.action)

    def _stripes(self) -> StripedFetch:
        return StripedFetch(
            self._sources,
            self._requests,
            silence_s=min(self._silence_s, self._timeout_s),
            wait_s=self._wait_s,
            accept=self._accept,
            expect=self._expect,
            max_bytes=self._max_bytes,
            on_received=self._on_received,
            others=self._others,
            own=self._own,
        )

    def _order(self, sources: list[str]) -> SourceOrder:
        return SourceOrder(sources, deadline=self._deadline, silence_s=self._silence_s)

    def _attempt(self, read: Read) -> State:
        self._source, self._received, self._tag = read.source, 0, ""
        with self._judging():
            self._open(read)
            state = decode(self, self._length, expect=self._expect)
            self._accept(state)
        return state

    def _resume(self, action: Read | Failed) -> None:
        """Raises _Next where that is not to go on with the state that is being decoded."""
        while isinstance(action, Read) and action.offset > 0:
            try:
                with self._judging():
                    return self._open(action)
            except _Next as next_:
                action = next_.action
        raise _Next(action)

    def _receive(self, buffer: memoryview) -> int:
        count = self._response.readinto(buffer) if self._response else 0
        if not count and self._received >= self._length:
            raise CorruptState(f"the state is longer than the {self._length} bytes that were announced")
        if not count:
            raise ConnectionError("the source withdrew it or has ended")
        self._received += count
        self._on_received(self._source, self._received, self._length)
        if self._pace is not None:
            self._pace.rest()
        return count

    # -- the connection

    def _open(self, read: Read) -> None:
        self._hang_up()
        self._requests.wait_until(read.at)
        self._connection = self._requests.connect(self._sources[read.source](), read.silence_s)
        headers = {"Range": f"bytes={read.offset}-", "If-Match": self._tag} if read.offset else {}
        tag = self._tag if read.offset else None
        self._response = self._connection.get(self._path(read), read.silence_s, headers, tag)
        if read.offset:
            check_rest(self._response, read.offset, self._length)
        else:
            self._length, self._tag = check_begin(self._response, self._max_bytes)

    def _path(self, read: Read) -> str:
        wait_s = read.silence_s * WAIT_SHARE if self._wait_s is None else self._wait_s
        return f"/checkpoint/{key_path(self._key, 0 if read.offset else wait_s)}"

    def _hang_up(self) -> None:
        connection, self._connection, self._response = self._connection, None, None
        if connection is not None:
            connection.close()

    # -- what a failure means

    @contextmanager
    def _judging(self) -> Generator[None, None, None]:
        """Tells the machine of a failure; _Next says what to do now."""
        try:
            yield
        except TimeoutError:
            self._refuse("sends nothing", StateUnavailable)
        except (OSError, http.client.HTTPException) as error:
            self._tell(Broken(self._received, f"{self._where()}: {error!r}"))
        except (StateUnavailable, LighthouseError) as error:
            kind = StateRefused if isinstance(error, StateRefused) else StateUnavailable
            self._refuse(f"is not available: {error}", kind)
        except (StateMismatch, CorruptState, ValueError) as error:
            if isinstance(error, StateMismatch):
                self._difference = self._difference or error.difference
            self._refuse(f"cannot be used, and was not installed: {error}", type(error))

    def _where(self) -> str:
        if self._response is None:
            return "is not available, no checkpoint server answers"
        return f"ended early, after {self._received} bytes"

    def _refuse(self, reason: str, kind: type[Exception]) -> None:
        self._kinds.append(kind)
        self._tell(Refused(reason))

    def _tell(self, event: Broken | Refused) -> None:
        """The cause is not kept: it holds on to what was decoded so far."""
        if self._requests.is_cancelled:
            raise StateUnavailable(
                f"the transfer of {self._key} was canceled: {self._requests.why_cancelled}"
            ) from None
        action = self._machine.handle(event, time.monotonic())
        if isinstance(action, Read) and action.source != self._source:
            log.warning("the state of %s from %s %s; trying %s", self._key, self._source, event.reason, action.source)
        raise _Next(action) from None

    def _failure(self, failed: Failed) -> Exception:
        what = f"the state of {self._key}"
        reasons = "; ".join(f"from {source} {reason}" for source, reason in failed.reasons)
        if failed.is_late:
            where = reasons or f"from {', '.join(self._sources)}"
            advice = "Check that process and the network; a longer heal timeout helps on slow links."
            return TimeoutError(f"{what} did not arrive within {self._timeout_s:g} s, {where}. {advice}")
        is_one_kind = len(set(self._kinds)) == 1 and len(self._kinds) == len(failed.reasons)
        kind = self._kinds[0] if is_one_kind else StateUnavailable
        if issubclass(kind, StateMismatch):
            return kind(f"{what} {reasons}", self._difference)
        return kind(f"{what} {reasons}")


class _Next(Exception):
    """Not a failure: the machine has said what to do now."""

    def __init__(self, action: Read | Failed) -> None:
        super().__init__(str(action))
        self.action = action
