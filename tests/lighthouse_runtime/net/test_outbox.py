"""Messages on their way into a stream; large ones a few at a time."""

import asyncio

import pytest

from lighthouse_runtime.net import outbox
from lighthouse_runtime.net.outbox import Outbox, WriteGate


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


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_they_enter_in_order_as_far_as_there_is_room():
    gate, entered = WriteGate(max_bytes=10), list[str]()

    async def write(name: str, size: int) -> None:
        await gate.enter(size)
        entered.append(name)

    writing = [asyncio.create_task(write(name, size)) for name, size in (("a", 6), ("b", 6), ("c", 4))]
    await settled()
    assert entered == ["a"], "c would have room, and b was first"
    gate.leave(6)
    await settled()
    assert entered == ["a", "b", "c"]
    await asyncio.gather(*writing)


async def test_one_that_is_larger_than_all_room_goes_alone():
    gate = WriteGate(max_bytes=10)
    await gate.enter(100)
    second = asyncio.create_task(gate.enter(1))
    await settled()
    assert not second.done()
    gate.leave(100)
    await second


async def test_one_that_gives_up_holds_up_nothing():
    gate = WriteGate(max_bytes=10)
    await gate.enter(10)
    waiting = [asyncio.create_task(gate.enter(10)) for _ in range(2)]
    await settled()
    waiting[0].cancel()
    await settled()
    gate.leave(10)
    await waiting[1]
    gate.leave(10)
    await gate.enter(10)


async def test_what_passes_one_of_several_passes_the_one_beyond_them():
    beyond = WriteGate(max_bytes=10)
    gates = [WriteGate(max_bytes=10, parent=beyond) for _ in range(3)]
    await gates[0].enter(10)
    waiting = [asyncio.create_task(gate.enter(6)) for gate in gates[1:]]
    await settled()
    assert not any(each.done() for each in waiting), "each has room of its own, and there is none for all"
    waiting[0].cancel()
    await settled()
    gates[0].leave(10)
    await waiting[1]
    await asyncio.wait_for(asyncio.create_task(gates[1].enter(4)), 10)
    gates[1].leave(4)
    gates[2].leave(6)
    await beyond.enter(10)


async def test_one_that_gives_up_in_its_turn_hands_it_on():
    gate = WriteGate(max_bytes=10)
    await gate.enter(10)
    waiting = [asyncio.create_task(gate.enter(10)) for _ in range(2)]
    await settled()
    gate.leave(10)
    waiting[0].cancel()
    await waiting[1]


async def test_streams_share_the_parts_of_a_message_and_a_deaf_one_ends_its_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "LARGE_BYTES", 4)
    monkeypatch.setattr(outbox, "LARGE_WRITTEN_WITHIN_S", 0.05)
    gate, read = WriteGate(max_bytes=10), list[bytes]()

    async def never(body: bytes) -> None:
        await asyncio.Event().wait()

    async def reads(body: bytes) -> None:
        read.append(body)

    deaf, reader = Outbox(never, gate), Outbox(reads, gate)
    assert deaf.put((b"shared", b"-own"))
    running = asyncio.create_task(deaf.run())
    await settled()
    assert reader.put((b"shared", b"-mine"))
    assert reader.put(b"s")
    reader.close()
    await reader.run()
    assert read == [b"shared-mine", b"s"]
    with pytest.raises(TimeoutError):
        await running
