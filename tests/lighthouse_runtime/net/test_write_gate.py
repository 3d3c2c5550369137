"""Large messages to one peer are on their way a few at a time."""

import asyncio

import pytest

from lighthouse_runtime.net import outbox
from lighthouse_runtime.net.outbox import Outbox, WriteGate


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
