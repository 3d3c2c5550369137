"""Who says that a collective of all participants is complete, where they are in several processes.

One process is the referee: python -m benchmarks.support.referee SOCKET. Each crowd tells it how many of its own are in
which step, and hears of the steps that are complete.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol

import uvloop

CONNECT_TIMEOUT_S = 10.0

Key = tuple[int, int]
"""(quorum_id, step)"""


class Judge(Protocol):
    """What a crowd tells; whoever made it hears of each key that is complete."""

    def tell(self, key: Key, present: int, size: int) -> None:
        """So many of the crowd's own are in that step now, of `size` participants in all crowds."""
        ...

    def pace(self, step_s: float) -> None:
        """A step is complete `step_s` after the last has come; infinite: it never is."""
        ...


class Referee:
    """Of all crowds, which are told apart by any object."""

    def __init__(self, complete: Callable[[Key], None]) -> None:
        self._complete = complete
        self._step_s = math.inf
        self._present: dict[Key, dict[object, int]] = {}
        self._sizes: dict[Key, int] = {}

    def tell(self, crowd: object, key: Key, present: int, size: int) -> None:
        self._present.setdefault(key, {})[crowd] = present
        self._sizes[key] = size
        if not self._count(key):
            del self._present[key], self._sizes[key]
        elif self._is_full(key):
            self._run(key)

    def pace(self, step_s: float) -> None:
        if step_s != self._step_s:
            self._step_s = step_s
            for key in filter(self._is_full, list(self._present)):
                self._run(key)

    def _count(self, key: Key) -> int:
        return sum(self._present.get(key, {}).values())

    def _is_full(self, key: Key) -> bool:
        return self._count(key) == self._sizes.get(key)

    def _run(self, key: Key) -> None:
        if self._step_s < math.inf:
            asyncio.get_running_loop().call_later(self._step_s, self._end, key)

    def _end(self, key: Key) -> None:
        if self._is_full(key):  # or somebody has left it: those who still wait will be revoked
            del self._present[key], self._sizes[key]
            self._complete(key)


class OwnReferee:
    """Of a crowd that is the only one. A Judge."""

    def __init__(self, complete: Callable[[Key], None]) -> None:
        self._referee = Referee(complete)

    def tell(self, key: Key, present: int, size: int) -> None:
        self._referee.tell(self, key, present, size)

    def pace(self, step_s: float) -> None:
        self._referee.pace(step_s)


class RemoteReferee:
    """In another process. A Judge."""

    def __init__(
        self, complete: Callable[[Key], None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._complete = complete
        self._writer = writer
        self._hearing = asyncio.create_task(self._hear(reader))

    @classmethod
    async def connect(cls, complete: Callable[[Key], None], path: str) -> "RemoteReferee":
        return cls(complete, *await asyncio.wait_for(asyncio.open_unix_connection(path), CONNECT_TIMEOUT_S))

    def tell(self, key: Key, present: int, size: int) -> None:
        self._say(key=key, present=present, size=size)

    def pace(self, step_s: float) -> None:
        self._say(pace=step_s)

    def _say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            quorum_id, step = json.loads(line)
            self._complete((quorum_id, step))


async def serve(path: str) -> None:
    writers: set[asyncio.StreamWriter] = set()

    def complete(key: Key) -> None:
        for writer in writers:
            writer.write(json.dumps(key).encode() + b"\n")

    referee = Referee(complete)

    async def crowd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        async for line in reader:
            message = json.loads(line)
            if "pace" in message:
                referee.pace(message["pace"])
            else:
                quorum_id, step = message["key"]
                referee.tell(writer, (quorum_id, step), message["present"], message["size"])
        writers.discard(writer)

    async with await asyncio.start_unix_server(crowd, path) as server:
        print("ready", flush=True)
        await server.serve_forever()


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
