"""A TCP proxy whose connections may fall silent (they stay open, take what is sent, and carry nothing) or be cut."""

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Self

LOCALHOST = "127.0.0.1"


class DeafProxy:
    """Passes bytes on to `port` of this host, from a thread of its own.

    `hush` makes every connection silent for ever, and those that are made from then on, too, until `forward` names the
    port that further connections are passed on to. `cut` resets them all, and refuses others until `mend`.
    """

    def __init__(self, port: int) -> None:
        self._port: int | None = port
        self._silent_before = 0
        self._connections = 0
        self._silent: list[object] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._take, LOCALHOST, 0))
        self.address = f"{LOCALHOST}:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    @property
    def connections(self) -> int:
        """How many were made so far."""
        return self._connections

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._server.close()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def hush(self) -> None:
        self._port, self._silent_before = None, self._connections + 1

    def hush_first(self, count: int) -> None:
        """Only the `count` connections that were made first."""
        self._silent_before = count + 1

    def forward(self, port: int) -> None:
        self._silent_before, self._port = self._connections + 1, port

    def cut(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def mend(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _listen(self) -> None:
        host, port = self.address.split(":")
        self._server = await asyncio.start_server(self._take, host, int(port))

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._serve(reader, writer)
        finally:
            self._writers.discard(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number, port = self._connections, self._port
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            if port is None:
                await self._pass_on(number, reader, None)
                return
            far_reader, far_writer = await asyncio.open_connection(LOCALHOST, port)
            self._writers.add(far_writer)
            with contextlib.closing(far_writer):
                ways = (self._pass_on(number, reader, far_writer), self._pass_on(number, far_reader, writer))
                ends = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    if number < self._silent_before:
                        self._silent.append(asyncio.current_task())  # the loop itself would let go of it
                        await asyncio.Event().wait()  # its end is not passed on either
                finally:
                    self._writers.discard(far_writer)
                    for end in ends:
                        end.cancel()

    async def _pass_on(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        while data := await reader.read(65536):
            if writer is not None and number >= self._silent_before:
                writer.write(data)
                await writer.drain()
