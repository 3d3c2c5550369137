"""The child's side of `Child.ask`: reads orders and writes replies as lines of JSON, until standard input closes."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any


def answer_orders(handle: Callable[..., Any]) -> None:
    for line in sys.stdin:
        print(json.dumps(handle(**json.loads(line))), flush=True)


async def answer_orders_async(handle: Callable[..., Awaitable[Any]]) -> None:
    """Answer orders while other tasks of the event loop run."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        print(json.dumps(await handle(**json.loads(line))), flush=True)
