"""A gRPC stream with very little overhead: a minimal HTTP/2 client with one stream per connection.

gRPC's client and server use about the same CPU time, so on one machine thousands of clients would compete with the
server for its cores. Here, a message takes a few lines of Python. The client only supports the messages of the
benchmarks: smaller than a frame, and few enough that the server's flow control never blocks them.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import grpc.aio

from lighthouse_protocol.coordinator import Coordinator
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.client.connection import Metadata
from lighthouse_runtime.security.client_tls import ClientTls

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _ENABLE_PUSH = 4, 5, 2  # settings
_ACK = _END_STREAM = 1
_RECEIVED_BYTES = 512 * 1024  # kernel buffer: takes a quorum of 10,000 groups and the ping after it
_END_HEADERS = 4
_MAX_FRAME = 2**24 - 1
_OWN_MAX_FRAME = 2**14  # accepted by every server
_WINDOW = 2**30
_FIRST_WINDOW = 2**16 - 1
_FRAME_HEAD = 9
_MESSAGE_HEAD = 5
_STREAM = 1


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _setting(number: int, value: int) -> bytes:
    return number.to_bytes(2, "big") + value.to_bytes(4, "big")


def _text(text: str) -> bytes:
    """Encode a string for HPACK without Huffman coding (RFC 7541, 5.2)."""
    body, length = text.encode(), bytearray()
    if len(body) < 127:
        return bytes((len(body),)) + body
    length.append(127)
    rest = len(body) - 127
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    length.append(rest)
    return bytes(length) + body


def _window_update(stream: int, count: int) -> bytes:
    return _frame(_WINDOW_UPDATE, 0, stream, count.to_bytes(4, "big"))


def opening(path: str, authority: str, metadata: Iterable[tuple[str, str]], *, has_tls: bool) -> bytes:
    """Return the bytes with which a client opens a connection and its stream."""
    settings = (
        _setting(_ENABLE_PUSH, 0) + _setting(_INITIAL_WINDOW_SIZE, _WINDOW) + _setting(_MAX_FRAME_SIZE, _MAX_FRAME)
    )
    headers = [
        (":method", "POST"),
        (":scheme", "https" if has_tls else "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0, settings)
        + _window_update(0, _WINDOW - _FIRST_WINDOW)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
    )


def _reason(trailers: bytes) -> str:
    """Extract the error message. gRPC's servers send it as plain text, without a table or Huffman coding."""
    _, _, rest = trailers.partition(b"grpc-message")
    return rest[1 : 1 + rest[0]].decode(errors="replace") if rest else "without a word"


class Turns:
    """Lets only a few readers run before the event loop polls its sockets again.

    So a busy process still answers pings at once, as gRPC's threads would.
    """

    AT_ONCE = 20

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_going = False

    def take(self, reader: "asyncio.Future[None]") -> None:
        """Complete the future `reader` when its turn comes."""
        self._waiting.append(reader)
        if not self._is_going:
            self._is_going = True
            asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        for _ in range(min(self.AT_ONCE, len(self._waiting))):
            reader = self._waiting.popleft()
            if not reader.done():
                reader.set_result(None)
        self._is_going = bool(self._waiting)
        if self._is_going:
            asyncio.get_running_loop().call_soon(self._go)


class LightCall(asyncio.Protocol):
    """The part of grpc.aio's call that AsyncStream uses."""

    def __init__(self, address: str, opening: bytes, turns: Turns) -> None:
        self._turns = turns
        self._address = address
        self._opening = opening
        self._transport: Any = None  # uvloop's is none of asyncio's classes
        self._frames = bytearray()
        self._body = bytearray()
        self._messages: deque[bytes] = deque()
        self._error: Unreachable | None = None
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._unacknowledged = 0
        self._may_send = {0: _FIRST_WINDOW, _STREAM: _FIRST_WINDOW}  # bytes, on the connection and on the stream

    # -- as grpc.aio's

    def done(self) -> bool:
        return self._has_ended

    async def wait_for_connection(self) -> None:
        """Do nothing: the call is created with its connection."""

    async def write(self, body: bytes) -> None:
        size = _MESSAGE_HEAD + len(body)
        if size > min(_OWN_MAX_FRAME, *self._may_send.values()):
            self._end(Unreachable(f"{self._address}: {size} bytes are more than a light stream may send now"))
        if self._has_ended:
            return
        for window in self._may_send:
            self._may_send[window] -= size
        self._transport.write(_frame(_DATA, 0, _STREAM, b"\0" + len(body).to_bytes(4, "big") + body))

    async def done_writing(self) -> None:
        if not self._has_ended:
            self._transport.write(_frame(_DATA, _END_STREAM, _STREAM, b""))

    async def read(self) -> object:
        """Return the next message, or EOF. Raises Unreachable."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._messages.popleft()

    def cancel(self) -> None:
        self._end(None)

    # -- as asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._opening)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Unreachable(f"{self._address} has closed the connection{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        if self._frames:
            self._frames += data
            data = bytes(self._frames)
        frames, at = memoryview(data), 0
        while len(frames) - at >= _FRAME_HEAD:
            start = at + _FRAME_HEAD
            end = start + int.from_bytes(frames[at : at + 3], "big")
            if len(frames) < end:
                break
            self._take(frames[at + 3], frames[at + 4], int.from_bytes(frames[at + 5 : start], "big"), frames[start:end])
            at = end
        self._frames = bytearray(frames[at:])

    def _take(self, kind: int, flags: int, stream: int, body: memoryview) -> None:
        """Handle a frame, and reply at once if it needs a reply."""
        if kind == _DATA:
            self._take_data(body)
        elif kind == _WINDOW_UPDATE:
            self._may_send[stream] += int.from_bytes(body, "big")
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, bytes(body)))
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(body), 6):
                if int.from_bytes(body[at : at + 2], "big") == _INITIAL_WINDOW_SIZE:
                    self._may_send[_STREAM] += int.from_bytes(body[at + 2 : at + 6], "big") - _FIRST_WINDOW
            self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind in (_RST_STREAM, _GOAWAY):
            self._end(Unreachable(f"{self._address} has ended the connection"))
        elif kind == _HEADERS and flags & _END_STREAM:
            self._end(Unreachable(f"{self._address} closed the stream: {_reason(bytes(body))}"))

    def _take_data(self, data: memoryview) -> None:
        self._unacknowledged += len(data)
        if self._unacknowledged > _WINDOW // 2:
            for stream in self._may_send:
                self._transport.write(_window_update(stream, self._unacknowledged))
            self._unacknowledged = 0
        body = self._body
        body += data
        while len(body) >= _MESSAGE_HEAD:
            end = _MESSAGE_HEAD + int.from_bytes(body[1:_MESSAGE_HEAD], "big")
            if len(body) < end:
                return
            with memoryview(body) as whole:
                self._messages.append(bytes(whole[_MESSAGE_HEAD:end]))
            del body[:end]
            self._wake()

    def _end(self, error: Unreachable | None) -> None:
        if not self._has_ended:
            self._has_ended, self._error = True, error
            if self._transport is not None:
                self._transport.abort()  # without a word, by TLS too
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self._turns.take(self._reader)
            self._reader = None


async def open_light(
    coordinator: Coordinator,
    tls: ClientTls | None,
    path: str,
    metadata: Metadata,
    turns: Turns,
    *,
    source: str,
    timeout_s: float,
) -> LightCall:
    """Open a stream from the local address `source`. Raises Unreachable."""
    address = coordinator.addresses[0]
    head = opening(path, str(address), metadata, has_tls=tls is not None)
    context = None
    if tls is not None:
        context = ssl.create_default_context(cadata=tls.roots.decode())
        context.set_alpn_protocols(["h2"])
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
    connection.bind((source, 0))
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (address.host, address.port))
            _, call = await loop.create_connection(
                lambda: LightCall(str(address), head, turns),
                sock=connection,
                ssl=context,
                server_hostname=(tls.name or address.host) if tls is not None else None,
            )
    except BaseException as e:
        connection.close()
        if not isinstance(e, OSError):  # TimeoutError is one
            raise
        raise Unreachable(f"{address} is unreachable: {e}") from e
    return call
