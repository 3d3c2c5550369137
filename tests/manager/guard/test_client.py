"""The guard, as the supervisor sees it."""

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from manager.guard import client
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


async def test_a_guard_that_does_not_exit_is_killed_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "END_TIMEOUT_S", 0.0)
    guard = GuardClient()
    process = guard._process  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(process, "poll", Mock(side_effect=[None] * 5 + [-9] * 5))
    await guard.stop()
    assert [record.message for record in caplog.records] == [f"the guard (pid {guard.pid}) does not exit; killing it"]
    process.wait(PATIENCE_S)


async def test_a_log_that_cannot_be_written_is_told(guard: GuardClient) -> None:
    ended = await run(guard, "true", log=Path("/proc/no/such.log"))
    assert ended.status == 127
    assert ended.output[0].startswith("cannot open its log file (--log-dir): ")
    assert "/proc/no" in ended.output[0]


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


async def test_a_process_that_stays_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is continued in time goes on; one that is not would keep its slot, and its GPU, for ever."""
    code = "import sys; sys.path.append(sys.argv.pop()); from manager.guard import guard; guard.STOPPED_S = 1.0; "
    monkeypatch.setattr(client, "_CODE", code + "guard.main()")
    started = GuardClient()
    task = asyncio.create_task(started.run())
    try:
        stays = run(started, "sh", "-c", "kill -STOP $$; echo on; exit 3")
        goes_on = run(started, "sh", "-c", "(sleep 0.2; kill -CONT $$) & kill -STOP $$; sleep 1.5; echo on; exit 3")
        assert await asyncio.gather(stays, goes_on) == [
            Ended(-9, (), "it was stopped by a signal for 1 s, and killed"),
            Ended(3, ("on",)),
        ]
    finally:
        await started.stop()
        await task


async def test_one_that_is_stopped_again_and_again_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks end with it, and run() tells."""
    monkeypatch.setattr(client, "END_TIMEOUT_S", 1.0)
    monkeypatch.setattr(client, "UNKILLABLE_S", 0.0)
    monkeypatch.setattr(client.GuardClient, "_resume_guard", lambda self: None)  # in vain
    started = GuardClient()
    task = asyncio.create_task(started.run())
    number = started.start(Command(("sleep", "600"), {}, "a/0", is_shown=False), lambda ended: None)
    assert await started.tail(number) == ()
    os.kill(started.pid, signal.SIGSTOP)
    asked = asyncio.create_task(started.tail(number))
    await asyncio.sleep(0)
    started.halt(number, 0.1)
    async with asyncio.timeout(PATIENCE_S):
        assert await task == -signal.SIGKILL
        assert await asked == (), "it is told, too"
        assert await started.tail(number) == (), "and who asks later"


async def test_one_that_is_stopped_is_woken(guard: GuardClient, caplog: pytest.LogCaptureFixture) -> None:
    assert await run(guard, "true") == Ended(0, ())
    os.kill(guard.pid, signal.SIGSTOP)
    assert await run(guard, "true") == Ended(0, ())
    assert "was stopped by a signal; continuing it" in caplog.text


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
        pytest.param("[" * 10_000, "", id="nested"),
    ],
)
def test_what_an_error_file_says(text: str, cause: str) -> None:
    assert cause_of(text) == cause


async def test_a_process_whose_error_file_is_nonsense_has_ended_too(guard: GuardClient) -> None:
    script = "head -c 50000 /dev/zero | tr '\\0' '[' > $TORCHELASTIC_ERROR_FILE; exit 3"
    assert await run(guard, "sh", "-c", script) == Ended(3, ())


async def test_a_command_whose_path_is_not_utf8_is_named_too(guard: GuardClient) -> None:
    text = "cannot run /no\\udcff: [Errno 2] No such file or directory: '/no\\udcff'"
    assert await run(guard, "/no\udcff") == Ended(127, (text,))
    assert await run(guard, "true") == Ended(0, ())


async def test_the_folder_of_error_files_is_locked_as_long_as_the_guard_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-tmpfiles removes the folders of /tmp that are older than 10 days, unless they are locked."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    guard = GuardClient()
    running = asyncio.create_task(guard.run())
    assert await run(guard, "true") == Ended(0, ())
    [folder] = os.listdir(tmp_path)
    descriptor = os.open(tmp_path / folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    await guard.stop()
    await running
    assert os.listdir(tmp_path) == []
