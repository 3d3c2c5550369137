"""What waits for a record, and what never leaves."""

import asyncio

import pytest

from lighthouse_protocol.refusals import LighthouseError, NotLeader
from lighthouse_runtime.server.streams import OutputGate

DEPOSED = NotLeader("deposed", leader="b:1")


class Said:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.refusal: LighthouseError | None = None
        self.gate = OutputGate(lambda: self.refusal)

    def say(self, word: str) -> None:
        self.gate.deliver(lambda: self.words.append(word))


def test_what_follows_a_record_waits_for_it_and_keeps_its_order() -> None:
    said = Said()
    said.say("before")
    first = said.gate.block()
    said.say("a")
    second = said.gate.block()
    said.say("b")
    assert said.words == ["before"]
    second()
    assert said.words == ["before"], "the first record is not durable yet"
    first()
    assert said.words == ["before", "a", "b"]
    said.say("c")
    assert said.words == ["before", "a", "b", "c"]


def test_what_is_dropped_is_never_said() -> None:
    said = Said()
    release = said.gate.block()
    said.say("a")
    said.gate.drop(DEPOSED)
    release()
    said.say("b")
    assert said.words == ["b"]


def test_a_server_that_may_not_speak_says_nothing_not_even_what_became_durable() -> None:
    said = Said()
    release = said.gate.block()
    said.say("a")
    said.refusal = DEPOSED
    release()
    said.say("b")
    assert said.words == []
    with pytest.raises(NotLeader, match="deposed"):
        said.gate.check()


async def test_a_call_waits_for_what_is_held_when_it_asks() -> None:
    said = Said()
    await said.gate.wait_delivered()
    release = said.gate.block()
    call = asyncio.create_task(said.gate.wait_delivered())
    await asyncio.sleep(0)
    assert not call.done()
    release()
    await call


async def test_a_call_that_waits_ends_with_the_reason_when_all_is_dropped() -> None:
    said = Said()
    said.gate.block()
    call = asyncio.create_task(said.gate.wait_delivered())
    await asyncio.sleep(0)
    said.gate.drop(DEPOSED)
    with pytest.raises(NotLeader) as caught:
        await call
    assert caught.value.leader == "b:1"


async def test_a_call_whose_answer_may_not_leave_any_more_is_refused() -> None:
    said = Said()
    said.refusal = DEPOSED
    with pytest.raises(NotLeader):
        await said.gate.wait_delivered()
