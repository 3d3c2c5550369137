"""One state from several sources at once. rules/stripes.py decides which pieces are asked of whom, this reads them.

The thread that runs the transfer reads what the lead's state is: its head, and the checksum of each piece. A thread for
each source, the lead's too, reads pieces. A piece is copied to its place when it has arrived whole, so two sources of
one piece cannot spoil each other's.

Where this cannot be done, nothing has failed: the state is then read from one source after the other. So it is with a
small state, sources of an earlier release, and where each source fails, to hear why.

Other targets that receive the same state meanwhile are read like sources, each for its share, and read from this one
what is here (arriving.py). A rank that may hold the very state already looks at its own first.
"""

import http.client
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Self

from xxhash import xxh3_64_digest

from agent_client.state.codec import (
    CHECKSUM_BYTES,
    PIECE_BYTES,
    Encoding,
    Head,
    allocate,
    count_pieces,
    layout_digest,
    piece_views,
    read_head,
)
from agent_client.state.snapshot import StateMismatch
from agent_client.state.tree import CorruptState, State, assemble
from agent_client.transfer.connection import (
    NONCE_HEADER,
    PROOF_HEADER,
    DeadlineSocket,
    StateUnavailable,
    check_answer,
    check_challenge,
    check_source,
    connect,
    is_unknown_route,
    split_address,
)
from agent_client.transfer.offers import Arriving, StateKey
from agent_client.transfer.rules.stripes import (
    Arrived,
    Ask,
    Broken,
    Cut,
    Event,
    LeadLost,
    Led,
    Own,
    PassedOver,
    Refused,
    StripePlan,
    Summed,
    Verified,
    shares,
)
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import SOURCE_WORD, TARGET_WORD, prove

log = logging.getLogger(__name__)


# -- requests -----------------------------------------------------------------
#
# A transfer's requests to its sources: connections under one deadline, which `cancel` ends from any thread.

WAIT_SHARE = 0.9
"""Of its time the source may wait for its snapshot, so that its refusal arrives before that is over."""


class Requests:
    """For the state under `key`. `secret`: of the quorum; source and target prove to each other that they know it.
    Empty: neither does."""

    def __init__(self, key: StateKey, deadline: float, secret: str = "") -> None:
        self.key = key
        self.secret = secret
        self.deadline = deadline
        self.why_cancelled = ""
        self.on_cancel: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._open: set[Connection] = set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def connect(self, address: str, silence_s: float) -> "Connection":
        """`silence_s` bounds each operation. ConnectionError once this was cancelled."""
        host, port = split_address(address)
        connection = Connection(self, address, connect(host, port, self.deadline, silence_s))
        with self._lock:
            self._open.add(connection)
            is_cancelled = self._cancelled.is_set()
        if is_cancelled:
            connection.close()
            raise ConnectionError("cancelled")
        return connection

    def cancel(self, reason: str) -> None:
        """No connection is opened any more, and those that are open end."""
        with self._lock:
            if not self._cancelled.is_set():
                self.why_cancelled = reason
            self._cancelled.set()
            connections = list(self._open)
        for connection in connections:
            connection.cut()
        self.on_cancel()

    def wait_until(self, moment: float) -> None:
        """Or until this is cancelled."""
        self._cancelled.wait(max(0.0, moment - time.monotonic()))

    def forget(self, connection: "Connection") -> None:
        with self._lock:
            self._open.discard(connection)


class Connection:
    """To one source. One thread uses it; `cut` is for any."""

    def __init__(self, requests: Requests, address: str, opened: DeadlineSocket) -> None:
        self._requests = requests
        self._address = address
        self._socket = opened
        self._http = http.client.HTTPConnection(*split_address(address))
        self._http.sock = opened
        self._response: http.client.HTTPResponse | None = None

    def get(
        self, path: str, silence_s: float, headers: Mapping[str, str] | None = None, tag: str | None = None
    ) -> http.client.HTTPResponse:
        """The answer of a source that is a member of the quorum, or a refusal. `tag`: of the state that is gone on
        with; by default, the one that the answer names. What was answered before has been read."""
        requests, key = self._requests, self._requests.key
        self._socket.silence_s = silence_s
        nonces, sent = self._challenge(), dict(headers or {})
        if requests.secret:
            proof = prove(requests.secret, TARGET_WORD, self._address, *key, *nonces)
            sent |= {NONCE_HEADER: nonces[1], PROOF_HEADER: proof}
        self._http.request("GET", path, headers=sent)
        self._response = response = self._http.getresponse()
        told = response.getheader("ETag", "") if tag is None else tag
        check_source(response, requests.secret, SOURCE_WORD, self._address, *key, *nonces, told)
        return response

    def _challenge(self) -> tuple[str, str]:
        """The source's nonce, good for one request on this connection, and ours."""
        if not self._requests.secret:
            return "", ""
        self._http.request("GET", "/challenge")
        self._response = self._http.getresponse()
        return check_challenge(self._response), secrets.token_hex(16)

    def cut(self) -> None:
        """Whoever reads from it is told at once that it has ended."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._requests.forget(self)
        if self._response is not None:
            self._response.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def key_path(key: StateKey, wait_s: float) -> str:
    """How a path ends: which state, and how long the source may wait for it."""
    return f"{key.quorum_id}/{key.step}/{key.group_rank}?wait_s={wait_s:.3f}"


MIN_STRIPED_BYTES = 32 * 2**20
"""A smaller state is here before a second source has begun."""

CONNECT_TIMEOUT_S = 5.0
"""To another target: its share is wanted meanwhile."""

SHOWN_BYTES = 2**19
"""How often progress is told."""

FindAddress = Callable[[], str]
OnBytes = Callable[[str, int, int], None]
"""Told of the source, the bytes that are here, and all that there are; on one thread at a time."""


@dataclass(frozen=True, slots=True)
class OtherTargets:
    """Those that receive the same state meanwhile. `names`: of all, in the order in which the state is shared out,
    empty for this one; `finds`: by name, what finds its address. `hand_on` offers them what is here."""

    names: Sequence[str]
    finds: Mapping[str, FindAddress]
    hand_on: Callable[[Arriving], None]

    def shares(self, sizes: Sequence[int]) -> dict[str, range]:
        """By name, the pieces that are asked of it."""
        dealt = zip(self.names, shares(sizes, len(self.names)), strict=True)
        return {name: share for name, share in dealt if name}


class StripedFetch:
    """The arguments are those of Fetch."""

    def __init__(
        self,
        sources: Mapping[str, FindAddress],
        requests: Requests,
        *,
        silence_s: float,
        wait_s: float | None,
        accept: Callable[[State], object],
        expect: Callable[[State], object] | None,
        max_bytes: int | None,
        on_received: OnBytes,
        others: OtherTargets | None,
        own: Encoding | None,
    ) -> None:
        self._sources = sources
        self._others, self._own = others, own
        self._requests = requests
        self._silence_s = silence_s
        self._wait_s = wait_s
        self._accept, self._expect = accept, expect
        self._max_bytes = max_bytes
        self._on_received = on_received
        self._transfer: _Transfer | None = None
        self.failed: set[str] = set()
        """Sources that are to be asked last, if at all."""

    def run(self) -> State | None:
        """None: not by this way."""
        try:
            for name in self._sources:
                if self._requests.is_cancelled or time.monotonic() >= self._requests.deadline:
                    return None
                if name not in self.failed and (state := self._led_by(name)) is not None:
                    return state
        except _SmallError:
            pass
        finally:
            if self._transfer is not None:
                self._transfer.end()
                self._transfer = None
        return None

    def _led_by(self, lead: str) -> State | None:
        """None: this one is no lead, or one no longer."""
        transfer, skeleton = None, None
        try:
            with self._requests.connect(self._sources[lead](), self._silence_s) as connection:
                response = connection.get(f"/manifest/{self._path()}", self._silence_s)
                if is_unknown_route(response):
                    return None
                check_answer(response)
                head = self._read_head(response)
                transfer, skeleton = self._follow(lead, head), head.skeleton
                del head
                for _ in range(transfer.count):
                    transfer.summed(_read_exactly(response, CHECKSUM_BYTES))
        except _FAILURES as error:
            self._lose(lead, transfer, error)
            if transfer is None:
                return None
        self.failed |= transfer.finish()
        if not transfer.is_done:
            return None
        state = assemble(skeleton, transfer.tensors)
        try:
            self._accept(state)
        except _UNUSABLE as error:
            self._lose(lead, None, error)
            return None
        transfer.log_shares()
        return state

    def _path(self) -> str:
        return key_path(self._requests.key, self._silence_s * WAIT_SHARE if self._wait_s is None else self._wait_s)

    def _read_head(self, response: http.client.HTTPResponse) -> Head:
        head = read_head(response)
        if self._max_bytes is not None and head.length > self._max_bytes:
            raise CorruptState(f"the state has {head.length} bytes, more than {self._max_bytes}")
        if response.length != sum(map(count_pieces, head.layouts)) * CHECKSUM_BYTES:
            raise CorruptState("what follows is not the checksums of its pieces")
        if self._expect is not None:
            self._expect(assemble(head.skeleton, head.layouts))
        if head.length < MIN_STRIPED_BYTES:
            raise _SmallError
        return head

    def _follow(self, lead: str, head: Head) -> "_Transfer":
        layout = layout_digest(head.layouts)
        if self._transfer is None:
            self._transfer = _Transfer(
                self._sources,
                self._others,
                self._own if self._own is not None and self._own.layout == layout else None,
                self._requests,
                head,
                layout,
                self._silence_s,
                self._on_received,
            )
        self._transfer.follow(lead, head, layout)
        return self._transfer

    def _lose(self, lead: str, transfer: "_Transfer | None", error: Exception) -> None:
        self.failed.add(lead)
        if not self._requests.is_cancelled:
            log.warning("cannot receive the state of %s from %s: %s", self._requests.key, lead, f"{error}")
        if transfer is not None:
            transfer.tell(LeadLost())


_UNUSABLE = (StateMismatch, CorruptState, ValueError)
_FAILURES = (OSError, http.client.HTTPException, StateUnavailable, LighthouseError, *_UNUSABLE)


class _SmallError(Exception):
    """The state is not worth it."""


class _Transfer:
    """The places of the pieces, and a thread for each source."""

    def __init__(
        self,
        sources: Mapping[str, FindAddress],
        others: OtherTargets | None,
        own: Encoding | None,
        requests: Requests,
        head: Head,
        layout: str,
        silence_s: float,
        on_received: OnBytes,
    ) -> None:
        self._sources = sources
        self._finds = sources if others is None else {**others.finds, **sources}
        self._requests = requests
        self._own = own
        self._own_checksums: Iterator[tuple[int, bytes]] = iter(())
        self._layout = layout
        self._head_bytes, self._total = head.size, head.length
        self._on_received = on_received
        self.tensors = allocate(head.layouts)
        self._places = list(piece_views(self.tensors))
        sizes = [len(place) + CHECKSUM_BYTES for place in self._places]
        self._starts = list(accumulate(sizes, initial=0))
        theirs = {} if others is None else others.shares(sizes)
        self._plan = StripePlan(sizes, list(sources), deadline=requests.deadline, silence_s=silence_s, others=theirs)
        self._arriving: Arriving | None = None
        if others is not None:
            self._arriving = Arriving(layout, self._places, self._starts)
            others.hand_on(self._arriving)
        self._lead = ""
        self._changed = threading.Condition()
        self._asks: dict[str, Ask] = {}
        self._connections: dict[str, Connection] = {}
        self._coming: dict[str, int] = {}
        self._told = 0
        self._is_ended = False
        self._readers: list[threading.Thread] = []
        requests.on_cancel = self._notice

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def is_done(self) -> bool:
        return self._plan.is_done

    def follow(self, lead: str, head: Head, layout: str) -> None:
        if layout != self._layout:
            raise CorruptState("its tensors are not those of the source that was read first")
        with self._changed:
            self._lead = lead
            self._head_bytes, self._total = head.size, head.length
        self._own_checksums = enumerate(self._own.checksums() if self._own is not None else ())
        self.tell(Led(lead))
        if not self._readers:
            for name in self._finds:
                reader = threading.Thread(target=self._read, args=(name,), name="lighthouse stripe", daemon=True)
                self._readers.append(reader)
                reader.start()

    def tell(self, event: Event) -> None:
        with self._changed:
            self._perform(event)

    def summed(self, checksum: bytes) -> None:
        """The next checksum of the lead."""
        self.tell(Summed(checksum))
        if self._plan.looks_at_own and (found := next(self._own_checksums, None)) is not None:
            self._look_at_own(*found)

    def _look_at_own(self, piece: int, checksum: bytes) -> None:
        with self._changed:
            if self._own is not None and self._plan.wants_own(checksum):
                self._copy(self._own, piece)
            self._perform(Own(checksum))
            self._show()

    def _copy(self, own: Encoding, piece: int) -> None:
        place, filled = self._places[piece], 0
        for chunk in own.stripe(self._starts[piece], self._starts[piece + 1] - CHECKSUM_BYTES):
            place[filled : filled + len(chunk)] = chunk
            filled += len(chunk)

    def finish(self) -> set[str]:
        """Wait until all is here, or another lead is needed, or none is left. Who was passed over."""
        with self._changed:
            while not (self._plan.is_over or self._plan.needs_lead or self._is_late()):
                self._wait()
            return set(self._plan.passed_over)

    def end(self) -> None:
        """Nothing is read any more."""
        with self._changed:
            self._is_ended = True
            if self._arriving is not None:
                self._arriving.end()
                self._arriving = None
            for connection in self._connections.values():
                connection.cut()
            self._changed.notify_all()
            self.tensors, self._places = [], []

    def _notice(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def log_shares(self) -> None:
        shares = ", ".join(f"{name} {given / 2**20:.0f} MiB" for name, given in self._plan.given.items())
        log.info("the state of %s came from %s", self._requests.key, shares)

    # -- with the lock

    def _perform(self, event: Event | None) -> None:
        now = time.monotonic()
        for effect in self._plan.tick(now) if event is None else self._plan.handle(event, now):
            match effect:
                case Ask(source):
                    self._asks[source] = effect
                case Cut(source):
                    log.info("%s is slow: reading its pieces from other groups", source)
                    self._cut(source)
                case PassedOver(source, reason):
                    if not self._is_late():
                        log.warning("stopped reading the state of %s from %s: %s", self._requests.key, source, reason)
                    self._cut(source)
                case Verified(piece, checksum):
                    if self._arriving is not None:
                        self._arriving.put(piece, checksum)
        self._changed.notify_all()

    def _cut(self, source: str) -> None:
        if (connection := self._connections.get(source)) is not None:
            connection.cut()

    def _wait(self) -> None:
        now = time.monotonic()
        if not self._changed.wait(max(0.0, self._plan.deadline(now) - now)):
            self._perform(None)

    def _is_late(self) -> bool:
        return self._requests.is_cancelled or time.monotonic() >= self._requests.deadline

    def _is_closed_to(self, source: str) -> bool:
        return self._is_ended or self._is_late() or source in self._plan.passed_over

    # -- a source's thread

    def _read(self, source: str) -> None:
        while (ask := self._next_ask(source)) is not None:
            with self._judging(source):
                self._receive(ask)
        self._hang_up(source)

    def _next_ask(self, source: str) -> Ask | None:
        with self._changed:
            while not self._is_closed_to(source):
                if (ask := self._asks.pop(source, None)) is not None:
                    return ask
                self._wait()
        return None

    def _receive(self, ask: Ask) -> None:
        connection = self._connections.get(ask.source) or self._connect(ask)
        self._check_awaited(ask.source, ask.pieces[0])
        path = f"/pieces/{self._layout}/{self._ranges(ask.pieces)}/"
        path += key_path(self._requests.key, ask.silence_s * WAIT_SHARE)
        response = connection.get(path, ask.silence_s)
        check_answer(response, sum(self._starts[piece + 1] - self._starts[piece] for piece in ask.pieces))
        buffer = memoryview(bytearray(PIECE_BYTES + CHECKSUM_BYTES))
        for piece in ask.pieces:
            self._check_awaited(ask.source, piece)
            self._receive_piece(ask.source, piece, response, buffer)

    def _receive_piece(self, source: str, piece: int, response: http.client.HTTPResponse, buffer: memoryview) -> None:
        size = self._starts[piece + 1] - self._starts[piece]
        filled = 0
        while filled < size:
            count = response.readinto(buffer[filled : min(size, filled + SHOWN_BYTES)])
            if not count:
                raise ConnectionError(f"it breaks off within piece {piece}")
            filled += count
            with self._changed:
                self._coming[source] = filled
                self._show()
        content, sent = buffer[: size - CHECKSUM_BYTES], bytes(buffer[size - CHECKSUM_BYTES : size])
        if xxh3_64_digest(content) != sent:
            raise CorruptState(f"the checksum of piece {piece} is wrong: damaged, or changed while it was sent")
        with self._changed:
            self._coming[source] = 0
            if not self._is_ended and self._plan.awaits(source) == piece:
                self._places[piece][:] = content
                self._perform(Arrived(source, sent))

    def _check_awaited(self, source: str, piece: int) -> None:
        with self._changed:
            if self._is_ended or self._plan.awaits(source) != piece:
                raise ConnectionError("it was cut off")

    def _show(self) -> None:
        received = min(self._total, self._head_bytes + self._plan.received + sum(self._coming.values()))
        if received > self._told and not self._is_ended:
            self._told = received
            self._on_received(self._lead, received, self._total)

    def _ranges(self, pieces: Sequence[int]) -> str:
        runs: list[list[int]] = []
        for piece in pieces:
            if runs and runs[-1][1] == piece:
                runs[-1][1] = piece + 1
            else:
                runs.append([piece, piece + 1])
        return ",".join(f"{self._starts[first]}-{self._starts[last]}" for first, last in runs)

    def _connect(self, ask: Ask) -> Connection:
        limit_s = ask.silence_s if ask.source in self._sources else min(ask.silence_s, CONNECT_TIMEOUT_S)
        connection = self._requests.connect(self._finds[ask.source](), limit_s)
        with self._changed:
            self._connections[ask.source] = connection
            if self._is_closed_to(ask.source):
                connection.cut()
        return connection

    def _hang_up(self, source: str) -> None:
        with self._changed:
            self._coming[source] = 0
            connection = self._connections.pop(source, None)
        if connection is not None:
            connection.close()

    @contextmanager
    def _judging(self, source: str) -> Generator[None, None, None]:
        try:
            yield
        except TimeoutError:
            self._fail(Refused(source, "it sends nothing"))
        except (OSError, http.client.HTTPException) as error:
            self._fail(Broken(source, f"its connection breaks: {error!r}"))
        except (StateUnavailable, LighthouseError, CorruptState, ValueError) as error:
            self._fail(Refused(source, f"{error}"))

    def _fail(self, event: Broken | Refused) -> None:
        self._hang_up(event.source)
        self.tell(event)


def _read_exactly(response: http.client.HTTPResponse, count: int) -> bytes:
    found = response.read(count)
    if len(found) < count:
        raise ConnectionError("it breaks off within its checksums")
    return found
