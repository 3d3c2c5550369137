"""Downloads one state from one or more sources. `rules/stripes.py` assigns the pieces to the sources.

One of the sources is the *lead*. Its checksums define the state. The calling thread reads the lead's manifest, which
consists of the head of the encoding and the checksum of each piece. One thread per source, including the lead, reads
pieces. With several sources, a piece is received completely before it is copied to its place, so that data from two
sources cannot mix. With a single source, pieces are read directly into place.

If the state is small, or the target is catching up, only the lead sends pieces. If the lead fails, another source
becomes the lead. The error from a failed download names every source.

A rank that may already hold the same state passes its state as `own`. If all checksums are equal, no piece is read.
"""

import http.client
import logging
import math
import operator
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, tee

from torch import Tensor
from xxhash import xxh3_64

from agent_client.healing.connection import (
    CANNOT_BE_SENT,
    NONCE_HEADER,
    PROOF_HEADER,
    DeadlineSocket,
    Pace,
    StateKey,
    StateRefused,
    StateUnavailable,
    check_answer,
    connect,
    split_address,
)
from agent_client.healing.rules.stripes import (
    FIRST_PAUSE_S,
    TRIES,
    ChecksumArrived,
    ConnectionLost,
    Disconnect,
    Event,
    LeadChosen,
    LeadLost,
    PieceArrived,
    PieceRequest,
    Refused,
    SourceRejected,
    StripePlan,
)
from agent_client.state.codec import (
    CHECKSUM_BYTES,
    PIECE_BYTES,
    Head,
    TruncatedState,
    allocate,
    count_pieces,
    encode,
    layout_digest,
    piece_views,
    read_head,
)
from agent_client.state.snapshot import StateMismatch, copy_of
from agent_client.state.tree import CorruptState, State, assemble, disassemble
from lighthouse_protocol.refusals import LighthouseError
from lighthouse_protocol.rules.access import SOURCE_WORD, TARGET_WORD, is_proven, prove

log = logging.getLogger(__name__)


WAIT_SHARE = 0.9
"""Share of the time limit for which a source may wait until it has the state. The rest is left for its response."""


class Requests:
    """Opens all connections of one transfer, with the same deadline. `cancel` shuts them down and is thread-safe."""

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

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or time.monotonic() >= self.deadline

    def silence_s(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, self.deadline - time.monotonic()))

    def connect(self, address: str, silence_s: float) -> "Connection":
        """Connect to a source. `silence_s` is the time limit per operation. Raise ConnectionError after `cancel`."""
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
        with self._lock:
            if not self._cancelled.is_set():
                self.why_cancelled = reason
            self._cancelled.set()
            connections = list(self._open)
        for connection in connections:
            connection.cut()
        self.on_cancel()

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`, by time.monotonic(), or until the transfer is cancelled."""
        self._cancelled.wait(max(0.0, moment - time.monotonic()))

    def discard_connection(self, connection: "Connection") -> None:
        with self._lock:
            self._open.discard(connection)


class Connection:
    """HTTP connection to one source. Only `cut` is thread-safe."""

    def __init__(self, requests: Requests, address: str, opened: DeadlineSocket) -> None:
        self._requests = requests
        self._address = address
        self._socket = opened
        self._http = http.client.HTTPConnection(*split_address(address))
        self._http.sock = opened
        self._http.auto_open = 0  # do not let http.client reconnect, which it does without a deadline
        self._response: http.client.HTTPResponse | None = None

    def get(self, path: str, silence_s: float) -> http.client.HTTPResponse:
        """Request `path`, and check the source's proof that it is a member of the quorum.

        The previous response must be fully read. `silence_s` is the time limit of each socket operation in seconds.
        """
        requests, key = self._requests, self._requests.key
        self._socket.silence_s = silence_s
        if not requests.secret:
            return self._request(path)
        challenge = self._request("/challenge")
        check_answer(challenge)
        challenge.read()
        nonces = challenge.getheader(NONCE_HEADER, ""), secrets.token_hex(16)
        proof = prove(requests.secret, TARGET_WORD, self._address, *key, *nonces)
        response = self._request(path, {NONCE_HEADER: nonces[1], PROOF_HEADER: proof})
        if response.status < 300 or response.status == CANNOT_BE_SENT:  # other refusals are not used as data
            answer = response.getheader(PROOF_HEADER, "")
            if not is_proven(answer, requests.secret, SOURCE_WORD, self._address, *key, *nonces):
                raise StateUnavailable("it did not prove that it is a member of the quorum; its data is not used")
        return response

    def _request(self, path: str, headers: Mapping[str, str] = {}) -> http.client.HTTPResponse:
        self._http.request("GET", path, headers=headers)
        self._response = self._http.getresponse()
        return self._response

    def cut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._requests.discard_connection(self)
        if self._response is not None:
            self._response.close()
        self._socket.close()


def key_path(key: StateKey, wait_s: float) -> str:
    """Return the last part of a request's path: the key, and how long the source may wait until it has the state."""
    return f"{key.quorum_id}/{key.step}/{key.group_rank}?wait_s={wait_s:.3f}"


MIN_STRIPED_BYTES = 32 * 2**20
"""Minimum size of a state to request from several sources. A smaller one arrives before a second source could begin."""

REPORT_BYTES = 2**19
"""Maximum number of bytes from one source between two reports of progress."""

FindAddress = Callable[[], str]
"""Function that looks up the address of a source, http://host:port."""
OnBytes = Callable[[str, int, int], None]
"""Callback that receives the name of the lead, the number of received bytes, and the total. Calls do not overlap."""


@dataclass(eq=False)
class Fetch:
    """A download of a state to CPU tensors. Its time limit starts when the object is created."""

    sources: Mapping[str, FindAddress]
    """Sources by name, in the order in which they become the lead if earlier ones fail."""
    key: StateKey
    timeout_s: float
    """Time limit of the download in seconds, not including the resolution of host names."""
    _: KW_ONLY
    accept: Callable[[State], object]
    """Called with the received state. It raises StateMismatch if this rank cannot use the state. Another source then
    becomes the lead."""
    expect: Callable[[State], object] = lambda layout: None
    """Called with the layout, a state of meta tensors, before any tensor is read. It raises like `accept`."""
    silence_s: float = math.inf
    """Time in seconds for which a source may send nothing while there is another source."""
    max_bytes: float = math.inf
    is_background: bool = False
    """True if no group is waiting for the download, which then yields CPU time and uses one connection."""
    secret: str = ""
    """The quorum's secret. Unless it is empty, source and target prove to each other that they know it."""
    on_received: OnBytes = lambda source, received, total: None
    own: State | None = None
    """This rank's state, if it may be equal to the requested state."""

    def __post_init__(self) -> None:
        self.requests = Requests(self.key, time.monotonic() + self.timeout_s, self.secret)
        self.silence_s = min(self.silence_s, self.timeout_s)
        self._transfer: _Transfer | None = None
        self._tries = dict.fromkeys(self.sources, 0)
        """How many times each source's connection broke while the source was the lead."""
        self._failed: dict[str, tuple[type[Exception], str]] = {}
        """Sources that can no longer be the lead, with the class and the message of each failure."""
        self._difference = ""

    def run(self) -> State:
        """Receive the state, check it with `accept`, and return it.

        Raises:
            TimeoutError: The state did not arrive in time.
            StateUnavailable: The download was cancelled, or no source of this quorum has the state.
            StateRefused, StateMismatch, CorruptState: Every source failed.
            ValueError: Every source's address is malformed.
        """
        if self.is_background:
            Pace()
        try:
            while (lead := self._next_lead()) is not None:
                if (state := self._receive_from(lead)) is not None:
                    return state
            raise self._failure()
        finally:
            self._end_transfer()

    def cancel(self, reason: str) -> None:
        self.requests.cancel(reason)

    # -- the lead

    @property
    def _remaining(self) -> list[str]:
        return [name for name in self.sources if name not in self._failed]

    def _next_lead(self) -> str | None:
        # A source that was rejected as a sender of pieces comes last. If it becomes the lead, the download starts over.
        rejected = self._transfer.failures if self._transfer is not None else {}
        lead = min(self._remaining, key=lambda name: (name in rejected, self._tries[name]), default=None)
        if lead is not None and self._tries[lead]:
            self.requests.wait_until(time.monotonic() + FIRST_PAUSE_S * 2 ** (self._tries[lead] - 1))
        if lead in rejected:
            self._end_transfer()
        return None if self.requests.is_over else lead

    def _receive_from(self, lead: str) -> State | None:
        """Receive the state that the checksums of the source `lead` define. Return None if this attempt fails."""
        transfer = None
        try:
            silence_s = self.requests.silence_s(self.silence_s if len(self._remaining) > 1 else math.inf)
            with closing(self.requests.connect(self.sources[lead](), silence_s)) as connection:
                response = connection.get(f"/manifest/{key_path(self.key, silence_s * WAIT_SHARE)}", silence_s)
                check_answer(response)
                head = self._read_head(response)
                count = sum(map(count_pieces, head.layouts))
                compared, checksums = tee(_read_exactly(response, CHECKSUM_BYTES) for _ in range(count))
                if (tensors := self._own_tensors(head, compared)) is not None:
                    self.accept(state := assemble(head.skeleton, tensors))
                    self.on_received(lead, head.length, head.length)
                    log.info("this rank already holds the tensors of %s, so none was transferred", self.key)
                    return state
                transfer = self._follow(lead, head)
                for checksum in checksums:
                    transfer.handle(ChecksumArrived(checksum))
            transfer.finish()
            if not transfer.is_done:
                if lead in transfer.failures:
                    self._drop_lead(lead, *transfer.failures[lead])
                return None
            self.accept(state := assemble(head.skeleton, transfer.tensors))
        except _FAILURES as error:
            self._fail(lead, error)
            if transfer is not None:
                transfer.handle(LeadLost())
            return None
        transfer.log_shares()
        return state

    def _read_head(self, response: http.client.HTTPResponse) -> Head:
        try:
            head = read_head(response)
        except TruncatedState as error:
            raise ConnectionError(f"{error}") from None
        if head.length > self.max_bytes:
            raise CorruptState(f"the state has {head.length} bytes, more than {self.max_bytes}")
        if response.length != sum(map(count_pieces, head.layouts)) * CHECKSUM_BYTES:
            raise CorruptState("what follows is not the checksums of its pieces")
        self.expect(assemble(head.skeleton, head.layouts))
        return head

    def _own_tensors(self, head: Head, checksums: Iterator[bytes]) -> list[Tensor] | None:
        if self.own is None or (own := encode(self.own)).layout != layout_digest(head.layouts):
            return None
        if not all(map(operator.eq, checksums, own.checksums())):  # stops at the first piece that differs
            return None
        return [copy_of(tensor.detach()) for tensor in disassemble(self.own)[1]]

    def _follow(self, lead: str, head: Head) -> "_Transfer":
        layout = layout_digest(head.layouts)
        if self._transfer is not None and self._transfer.layout != layout:
            self._end_transfer()
        if self._transfer is None:
            self._transfer = _Transfer(self, {name: self.sources[name] for name in self._remaining}, head, layout)
        self._transfer.follow(lead, head)
        return self._transfer

    def _end_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.stop()

    # -- failures

    def _fail(self, lead: str, error: Exception) -> None:
        kind, reason = _classify(error)
        self._tries[lead] += _is_broken(error)
        if isinstance(error, StateMismatch):
            self._difference = self._difference or error.difference
        if self._tries[lead] >= TRIES:
            reason += f" ({TRIES} times in a row)"
        if self._tries[lead] >= TRIES or not _is_broken(error):
            self._drop_lead(lead, kind, reason)
        elif len(self._remaining) > 1:
            self._warn(lead, reason)

    def _drop_lead(self, lead: str, kind: type[Exception], reason: str) -> None:
        self._failed[lead] = kind, reason
        if self._remaining:
            self._warn(lead, reason)

    def _warn(self, lead: str, reason: str) -> None:
        if not self.requests.is_cancelled:
            log.warning("cannot receive the state of %s from %s, which %s", self.key, lead, reason)

    def _failure(self) -> Exception:
        what = f"the state of {self.key}"
        if self.requests.is_cancelled:
            return StateUnavailable(f"the transfer of {self.key} was canceled: {self.requests.why_cancelled}")
        reasons = "; ".join(f"from {source} {reason}" for source, (_, reason) in self._failed.items())
        if self.requests.is_over:
            where = reasons or f"from {', '.join(self.sources)}"
            advice = "Check that process and the network; a longer heal timeout helps on slow links."
            return TimeoutError(f"{what} did not arrive within {self.timeout_s:g} s, {where}. {advice}")
        kinds = {kind for kind, _ in self._failed.values()}
        kind = kinds.pop() if len(kinds) == 1 else StateUnavailable
        if issubclass(kind, StateMismatch):
            return kind(f"{what} {reasons}", self._difference)
        return kind(f"{what} {reasons}")


_FAILURES = (
    OSError,
    http.client.HTTPException,
    StateUnavailable,
    LighthouseError,
    StateMismatch,
    CorruptState,
    ValueError,
)


def _is_broken(error: Exception) -> bool:
    """Return whether the connection broke or could not be opened. Another attempt may then succeed."""
    return isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, TimeoutError)


def _classify(error: Exception) -> tuple[type[Exception], str]:
    """Return the exception class to raise if every source fails with `error`, and a message about the source."""
    if isinstance(error, TimeoutError):
        return StateUnavailable, "sends nothing"
    if _is_broken(error):
        return StateUnavailable, f"is not available, no checkpoint server answers: {error!r}"
    if isinstance(error, StateUnavailable | LighthouseError):
        kind = StateRefused if isinstance(error, StateRefused) else StateUnavailable
        return kind, f"is not available: {error}"
    return type(error), f"cannot be used, and was not installed: {error}"


class _Transfer:
    """Receives the tensors of one state, with a reader thread for each source.

    One source at a time is the lead, whose checksums define the state.
    """

    def __init__(self, fetch: Fetch, sources: Mapping[str, FindAddress], head: Head, layout: str) -> None:
        self._fetch, self._requests = fetch, fetch.requests
        self._sources = sources
        self._is_sole = len(sources) == 1
        self.layout = layout
        self._head_bytes, self._total = head.size, head.length
        self.tensors = allocate(head.layouts)
        self._places = list(piece_views(self.tensors))
        sizes = [len(place) + CHECKSUM_BYTES for place in self._places]
        self._starts = list(accumulate(sizes, initial=0))
        self._plan = StripePlan(
            sizes,
            list(sources),
            deadline=fetch.requests.deadline,
            silence_s=fetch.silence_s,
            leads_alone=head.length < MIN_STRIPED_BYTES or fetch.is_background,
        )
        self._lead = ""
        self._changed = threading.Condition()
        self._pending: dict[str, PieceRequest] = {}
        self._connections: dict[str, Connection] = {}
        self._partial: dict[str, int] = {}
        self._reported = 0
        self._is_ended = False
        self._readers: list[threading.Thread] = []
        self._kinds: dict[str, type[Exception]] = {}
        fetch.requests.on_cancel = self._notify_changed

    @property
    def is_done(self) -> bool:
        return self._plan.is_done

    @property
    def failures(self) -> dict[str, tuple[type[Exception], str]]:
        with self._changed:
            rejected = self._plan.rejected
            return {name: (self._kinds.get(name, StateUnavailable), why) for name, why in rejected.items()}

    def follow(self, lead: str, head: Head) -> None:
        """Receive the state that the source `lead` has described in `head`. The first call starts the readers."""
        with self._changed:
            self._lead = lead
            self._head_bytes, self._total = head.size, head.length
        self.handle(LeadChosen(lead))
        if not self._readers:
            for name in self._sources:
                reader = threading.Thread(target=self._read, args=(name,), name="lighthouse stripe", daemon=True)
                self._readers.append(reader)
                reader.start()

    def handle(self, event: Event) -> None:
        with self._changed:
            self._perform(event)

    def finish(self) -> None:
        """Wait until the state is complete, a new lead is needed, no source is left, or the download is over."""
        with self._changed:
            while not (self._plan.is_over or self._plan.needs_lead or self._requests.is_over):
                self._wait()

    def stop(self) -> None:
        with self._changed:
            self._is_ended = True
            for connection in self._connections.values():
                connection.cut()
            self._changed.notify_all()
            self.tensors, self._places = [], []

    def _notify_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def log_shares(self) -> None:
        if self._plan.shares.keys() - {self._lead}:
            shares = ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in self._plan.shares.items())
            log.info("the state of %s came from %s", self._requests.key, shares)

    # -- called with the lock held

    def _perform(self, event: Event | None) -> None:
        now = time.monotonic()
        for effect in self._plan.tick(now) if event is None else self._plan.handle(event, now):
            match effect:
                case PieceRequest(source):
                    self._pending[source] = effect
                case Disconnect(source):
                    log.info("%s is slow: reading its pieces from other groups", source)
                    self._cut(source)
                case SourceRejected(source, reason):
                    if not (self._requests.is_over or self._plan.is_over):
                        key = self._requests.key
                        log.warning("stopped reading the state of %s from %s, which %s", key, source, reason)
                    self._cut(source)
        self._changed.notify_all()

    def _cut(self, source: str) -> None:
        if (connection := self._connections.get(source)) is not None:
            connection.cut()

    def _wait(self) -> None:
        now = time.monotonic()
        if not self._changed.wait(max(0.0, self._plan.deadline(now) - now)):
            self._perform(None)

    def _is_closed_to(self, source: str) -> bool:
        return self._is_ended or self._requests.is_over or source in self._plan.rejected

    # -- run on a source's thread

    def _read(self, source: str) -> None:
        pace = Pace() if self._fetch.is_background else None
        while (request := self._next_request(source)) is not None:
            try:
                self._receive(request, pace)
            except _FAILURES as error:
                self._disconnect(source)
                kind, reason = _classify(error)
                if _is_broken(error):
                    self.handle(ConnectionLost(source, f"breaks the connection: {error!r}"))
                else:
                    self._kinds[source] = kind
                    self.handle(Refused(source, reason))
        self._disconnect(source)

    def _next_request(self, source: str) -> PieceRequest | None:
        with self._changed:
            while not self._is_closed_to(source):
                if (request := self._pending.pop(source, None)) is not None:
                    return request
                self._wait()
        return None

    def _receive(self, request: PieceRequest, pace: Pace | None) -> None:
        connection = self._connections.get(request.source) or self._connect(request)
        self._awaited_place(request.source, request.pieces[0])
        path = f"/pieces/{self.layout}/{self._ranges(request.pieces)}/"
        path += key_path(self._requests.key, request.silence_s * WAIT_SHARE)
        response = connection.get(path, request.silence_s)
        check_answer(response, sum(self._starts[piece + 1] - self._starts[piece] for piece in request.pieces))
        buffer = memoryview(bytearray(0 if self._is_sole else PIECE_BYTES))
        for piece in request.pieces:
            place = self._awaited_place(request.source, piece)
            place = place if self._is_sole else buffer[: len(place)]
            self._receive_piece(request.source, piece, response, place, pace)

    def _receive_piece(
        self, source: str, piece: int, response: http.client.HTTPResponse, content: memoryview, pace: Pace | None
    ) -> None:
        filled, checksum = 0, xxh3_64()
        while filled < len(content):
            count = response.readinto(content[filled : filled + REPORT_BYTES])
            if not count:
                raise ConnectionError(f"it breaks off within piece {piece}")
            checksum.update(content[filled : filled + count])
            filled += count
            with self._changed:
                self._partial[source] = filled
                self._report()
            if pace is not None:
                pace.rest()
        sent = _read_exactly(response, CHECKSUM_BYTES)
        if checksum.digest() != sent:
            raise CorruptState(f"the checksum of piece {piece} is wrong: damaged, or changed while it was sent")
        with self._changed:
            self._partial[source] = 0
            if not self._is_ended and self._plan.next_piece(source) == piece:
                if not self._is_sole:
                    self._places[piece][:] = content
                self._perform(PieceArrived(source, sent))
                self._report()

    def _awaited_place(self, source: str, piece: int) -> memoryview:
        """Return the memory for `piece`. Raise ConnectionError if `source` is no longer expected to send it next."""
        with self._changed:
            if self._is_ended or self._plan.next_piece(source) != piece:
                raise ConnectionError("it was cut off")
            return self._places[piece]

    def _report(self) -> None:
        received = min(self._total, self._head_bytes + self._plan.received + sum(self._partial.values()))
        if received > self._reported and not self._is_ended:
            self._reported = received
            self._fetch.on_received(self._lead, received, self._total)

    def _ranges(self, pieces: Sequence[int]) -> str:
        runs: list[list[int]] = []
        for piece in pieces:
            if runs and runs[-1][1] == piece:
                runs[-1][1] = piece + 1
            else:
                runs.append([piece, piece + 1])
        return ",".join(f"{self._starts[first]}-{self._starts[last]}" for first, last in runs)

    def _connect(self, request: PieceRequest) -> Connection:
        connection = self._requests.connect(self._sources[request.source](), request.silence_s)
        with self._changed:
            self._connections[request.source] = connection
            if self._is_closed_to(request.source):
                connection.cut()
        return connection

    def _disconnect(self, source: str) -> None:
        with self._changed:
            self._partial[source] = 0
            connection = self._connections.pop(source, None)
        if connection is not None:
            connection.close()


def _read_exactly(response: http.client.HTTPResponse, count: int) -> bytes:
    found = response.read(count)
    if len(found) < count:
        raise ConnectionError("it breaks off within a checksum")
    return found
