"""The guard, as the supervisor sees it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manager.guard.client import Command, Ended, GuardClient, cause_of
from tests.processes import PATIENCE_S


@pytest.fixture
async def guard() -> AsyncIterator[GuardClient]:
    """It runs after the first order."""
    started = GuardClient()
    task = asyncio.create_task(started.run())
    yield started
    await started.stop()
    await task


async def run(guard: GuardClient, *argv: str, env: dict[str, str] | None = None, log: Path | None = None) -> Ended:
    ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    guard.start(Command(argv, env or {}, "a/0", str(log) if log else None, is_shown=False), ended.set_result)
    async with asyncio.timeout(PATIENCE_S):
        return await ended


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("echo $SAID; exit 3", Ended(3, ("hello",))),
        ("exec >&- 2>&-; sleep 0.2; exit 4", Ended(4, ())),
        ('echo \'{"message": "loss is nan"}\' > $TORCHELASTIC_ERROR_FILE; exit 1', Ended(1, (), "loss is nan")),
    ],
)
async def test_an_order_from_before_it_is_attached_is_obeyed(guard: GuardClient, script: str, ended: Ended) -> None:
    assert await run(guard, "sh", "-c", script, env={"SAID": "hello"}) == ended


async def test_both_outputs_go_to_the_log_in_order_to_their_end(guard: GuardClient, tmp_path: Path) -> None:
    log = tmp_path / "new" / "rank_0.log"
    ended = await run(guard, "sh", "-c", "echo one; echo two >&2; seq 20000", log=log)
    assert ended.output[-1] == "20000"
    assert log.read_text() == "one\ntwo\n" + "".join(f"{i}\n" for i in range(1, 20001))


async def test_a_log_that_cannot_be_written_is_told(guard: GuardClient) -> None:
    ended = await run(guard, "true", log=Path("/proc/no/such.log"))
    assert ended.status == 127
    assert "cannot run true: " in ended.output[0]


async def test_what_it_has_written_so_far(guard: GuardClient) -> None:
    ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    script = "echo one; printf two; read _"
    number = guard.start(Command(("sh", "-c", script), {}, "a/0", is_shown=False, has_input=True), ended.set_result)
    async with asyncio.timeout(PATIENCE_S):
        while await guard.tail(number) != ("one", "two"):
            pass
        assert await asyncio.gather(guard.tail(number), guard.tail(number)) == [("one", "two")] * 2
        guard.halt(number, 0.0)
        await ended
        assert await guard.tail(number) == ()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ("null", ""),
        ('{"message": "plain"}', "plain"),
        ('{"message": {"message": "two\\nlines"}}', "two lines"),
        ('{"message": {"other": 1}}', ""),
    ],
)
def test_what_an_error_file_says(text: str, cause: str) -> None:
    assert cause_of(text) == cause
