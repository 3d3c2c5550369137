"""Messages on their way into a stream."""

import asyncio

import pytest

from lighthouse_runtime.net import outbox
from lighthouse_runtime.net.outbox import Outbox


class Reader:
    """A peer that reads only while it is `reading`."""

    def __init__(self) -> None:
        self.read: list[bytes] = []
        self.reading = asyncio.Event()

    async def write(self, body: bytes) -> None:
        await self.reading.wait()
        self.read.append(body)


@pytest.fixture
async def reader() -> Reader:
    return Reader()


async def test_all_is_written_in_order_and_then_it_ends(reader: Reader) -> None:
    box = Outbox(reader.write)
    running = asyncio.create_task(box.run())
    reader.reading.set()
    assert box.put(b"1")
    assert box.put(b"2")
    await asyncio.sleep(0.01)
    assert reader.read == [b"1", b"2"]
    assert box.put(b"3")
    box.close()
    box.put(b"after the end")
    await asyncio.wait_for(running, 5)
    assert reader.read == [b"1", b"2", b"3"]


async def test_clear_gives_up_what_waits(reader: Reader) -> None:
    box = Outbox(reader.write)
    running = asyncio.create_task(box.run())
    for body in (b"1", b"2", b"3"):
        box.put(body)
    await asyncio.sleep(0.01)
    box.clear()
    reader.reading.set()
    await asyncio.wait_for(running, 5)
    assert reader.read == [b"1"]


async def test_the_number_is_limited(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_QUEUED_MESSAGES", 3)
    box = Outbox(reader.write)
    assert [box.put(b"") for _ in range(5)] == [True, True, True, False, False]


async def test_the_size_is_limited_but_one_message_always_has_room(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_QUEUED_BYTES", 10)
    box = Outbox(reader.write)
    running = asyncio.create_task(box.run())
    assert box.put(b"x" * 100)
    assert not box.put(b"x")
    reader.reading.set()
    await asyncio.sleep(0.01)
    assert [box.put(b"x" * 5) for _ in range(3)] == [True, True, False]
    box.close()
    await asyncio.wait_for(running, 5)
    assert len(reader.read) == 3


async def test_a_write_that_fails_ends_it(reader: Reader) -> None:
    async def write(_: bytes) -> None:
        raise ConnectionError("gone")

    box = Outbox(write)
    box.put(b"1")
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(box.run(), 5)
