"""What does not last is not said."""

import asyncio

from lighthouse_runtime.timing.timers import SustainedNotice

AFTER_S = 0.02


async def said(*texts: str, apart_s: float) -> list[str]:
    heard: list[str] = []
    lasting = SustainedNotice(asyncio.get_running_loop(), heard.append, lambda: heard.append("over"), AFTER_S)
    for text in texts:
        lasting.set(text)
        await asyncio.sleep(apart_s)
    lasting.close()
    return heard


async def test_what_changes_too_soon_is_not_said():
    assert await said("a", "b", "", apart_s=0) == []


async def test_what_lasts_is_said_once_and_when_it_is_over():
    assert await said("a", "a", "b", "", "", apart_s=4 * AFTER_S) == ["a", "b", "over"]


async def test_a_new_start_is_said_anew():
    assert await said("a", "", "a", apart_s=4 * AFTER_S) == ["a", "over", "a"]
