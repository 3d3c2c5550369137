"""The loop of a daemon: its priority, and what systemd receives over a socket like its own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.process.loop import (
    FED_PER_TIMEOUT,
    MIN_OPEN_FILES,
    NICE,
    STATUS_EVERY_S,
    ServiceManager,
    on_failed_callbacks,
    start_part,
)
from lighthouse_runtime.timing.timers import DeadlineTimer
from tests.processes import Lighthouse, Process, eventually
from tests.virtual_loop import VirtualLoop

DAEMON = """
import os, sys, threading
from lighthouse_runtime.process.loop import run_daemon

os.nice(int(sys.argv[1]))
if sys.argv[2] == "nobody":
    os.setuid(65534)

async def main(stop):
    print("nice", os.getpriority(os.PRIO_PROCESS, 0))
    thread = threading.Thread(target=lambda: print("thread", os.getpriority(os.PRIO_PROCESS, 0)))
    thread.start()
    thread.join()

sys.exit(run_daemon(main))
"""


LIMITED = """
import resource, sys
from lighthouse_runtime.process.commands import lighthouse

limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
lighthouse()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="raising a process's priority is root's")
@pytest.mark.parametrize(("nice", "user", "expected"), [(0, "root", NICE), (5, "root", 5), (0, "nobody", 0)])
def test_priority(nice: int, user: str, expected: int):
    with Process(DAEMON, [str(nice), user]) as process:
        assert process.wait() == 0, process.log()
        assert f"nice {expected}\nthread {expected}" in process.log()


@pytest.mark.parametrize("limit", [MIN_OPEN_FILES - 1, MIN_OPEN_FILES])
def test_a_lighthouse_starts_with_enough_open_files_or_says_that_they_are_too_few(limit: int, tmp_path: Path) -> None:
    options = ["serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--journal", str(tmp_path / "j.sqlite")]
    with Process(LIMITED, [str(limit), *options]) as process:
        if limit == MIN_OPEN_FILES:
            process.wait_for_log("serves gRPC")
        else:
            assert process.wait() == 1
            assert process.log() == "Error: ulimit -n: 63 open files are too few; at least 64 are needed\n"


async def test_a_part_that_fails_ends_its_daemon_unless_training_can_do_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    statuses: list[int] = []

    async def fail() -> None:
        raise KeyError("a defect")

    waiting = start_part(asyncio.sleep(60.0), "a part that is cancelled", statuses.append)
    short = start_part(asyncio.sleep(0), "a short part", print)
    await asyncio.wait([start_part(fail(), "the link", statuses.append), start_part(fail(), "samples", None), short])
    waiting.cancel()
    await asyncio.wait([waiting])
    assert statuses == [1]
    assert sorted(caplog.messages) == [
        "a defect has ended samples, and this process continues without it",
        "a defect has ended the link, and this process ends with it",
    ]
    assert all(line.exc_info for line in caplog.records)


async def test_a_timer_that_fails_ends_its_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of libraries, and refusals, are only logged, as asyncio does."""
    statuses: list[int] = []
    loop = asyncio.get_running_loop()
    on_failed_callbacks(loop, statuses.append)

    def fail(error: Exception) -> None:
        raise error

    loop.call_soon(fail, BlockingIOError("in a library"))
    DeadlineTimer(lambda: fail(Unreachable("the journal cannot be written")), loop).set_after(0.0)
    await asyncio.sleep(0.01)
    assert statuses == []
    DeadlineTimer(lambda: fail(KeyError("a defect")), loop).set(loop.time())
    await asyncio.sleep(0.01)
    assert statuses == [1]
    assert [line.message.partition("(")[0] for line in caplog.records] == [
        "Exception in callback test_a_timer_that_fails_ends_its_daemon.<locals>.fail",
        "Exception in callback DeadlineTimer._fire",
        "a defect has ended a timer or callback, and this process ends with it",
    ]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        yield receiver


def heard(receiver: socket.socket) -> list[list[str]]:
    """The lines of each datagram so far."""
    found: list[list[str]] = []
    while True:
        try:
            found.append(receiver.recv(4096).decode().split())
        except BlockingIOError:
            return found


def test_it_serves_and_stops(systemd: socket.socket) -> None:
    manager = ServiceManager(VirtualLoop(), lambda: "serves\n2 jobs")
    manager.ready()
    manager.stopping()
    assert heard(systemd) == [["READY=1", "STATUS=serves", "2", "jobs"], ["STOPPING=1"]]


def test_the_watchdog_is_fed_by_the_loop_alone(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "6000000")
    loop, states = VirtualLoop(), iter(["a", "a", "b", "b"])
    manager = ServiceManager(loop, lambda: next(states))
    manager.ready()
    heard(systemd)
    loop.go(6.0)
    assert heard(systemd) == [["WATCHDOG=1"], ["WATCHDOG=1", "STATUS=b"], ["WATCHDOG=1"]]
    manager.close()
    loop.go(60.0)
    assert heard(systemd) == []
    assert FED_PER_TIMEOUT >= 2


@pytest.mark.parametrize("watchdog_us", ["0", "600000000"])
def test_its_state_is_told_soon(watchdog_us: str, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", watchdog_us)
    loop, states = VirtualLoop(), iter(["a", "b"])
    ServiceManager(loop, lambda: next(states)).ready()
    heard(systemd)
    loop.go(STATUS_EVERY_S)
    [told] = heard(systemd)
    assert told[-1] == "STATUS=b"


def test_the_watchdog_of_another_process_is_not_fed(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child inherits the variables."""
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    loop = VirtualLoop()
    ServiceManager(loop).ready()
    loop.go(60.0)
    assert heard(systemd) == [["READY=1"]]


def test_a_name_in_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{tmp_path}")
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        ServiceManager(VirtualLoop()).ready()
        assert heard(receiver) == [["READY=1"]]


@pytest.mark.parametrize("name", ["", "nonsense"])
def test_without_systemd_nothing_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    loop = VirtualLoop()
    ServiceManager(loop).ready()
    loop.go(10.0)


def test_a_socket_that_is_gone_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    ServiceManager(VirtualLoop()).ready()
    assert caplog.messages == ["cannot notify systemd (NOTIFY_SOCKET): No such file or directory"]


def test_a_lighthouse_is_ready_when_it_serves_and_feeds_its_watchdog(systemd: socket.socket) -> None:
    env = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "300000"}
    with Lighthouse(env=env) as lighthouse:
        told = eventually(lambda: heard(systemd), "systemd is told")
        assert told[0] == ["READY=1", "STATUS=serving;", "no", "jobs"]
        eventually(lambda: sum(["WATCHDOG=1" in lines for lines in heard(systemd)]), "its watchdog is fed")
        lighthouse.stop()
        assert ["STOPPING=1"] in heard(systemd)
