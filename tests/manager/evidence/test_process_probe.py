"""A look at a process from outside: its state in /proc, its stacks, and what is missing."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lighthouse_protocol.messages.incident import ProcessSnapshot
from lighthouse_protocol.messages.session import EvidenceOffer, WatchHello
from lighthouse_runtime.process.children import host_id, process_descriptor, started_at
from manager import evidence
from manager.evidence import (
    ELSEWHERE,
    NO_OUTPUT,
    NoStacksError,
    ProcessState,
    ThreadState,
    probe,
    probe_alone,
    probe_with_output,
    read_process,
    read_thread,
    take_stacks,
)
from tests.processes import PATIENCE_S, Process, eventually

SEEN = ProcessSnapshot("stacks", "pid 71: S (sleeping)", missing=("other: why",))
# This process offers nothing.
OWN = WatchHello(1, "w", os.getpid(), host_id(), started_at(os.getpid()))
GONE = replace(OWN, started=OWN.started + 1)


async def test_a_process_without_a_handler_is_sent_no_signal():
    seen = await probe(OWN)
    assert seen.process.startswith(f"pid {os.getpid()} (")
    missing = ("stacks: it has no handler that writes its stacks",)
    assert (seen.stacks, seen.missing, seen.is_stopped) == ("", missing, False)
    seen = await probe(replace(OWN, offer=EvidenceOffer(64, 3)))
    assert seen.missing == ("stacks: it has no handler for signal 64 any more, and the signal would kill it",)


async def test_a_pid_that_names_another_process_by_now():
    ended = f"{os.getpid()} has ended"
    assert await probe(GONE) == ProcessSnapshot(missing=(f"stacks: process {ended}", f"process: {ended}"))
    assert (await probe_alone(GONE, True)).missing[1:] == (f"process: {ended}", NO_OUTPUT)
    assert await probe_alone(OWN, False) == ProcessSnapshot(missing=(ELSEWHERE, NO_OUTPUT))


@pytest.mark.parametrize(
    ("lines", "output", "missing"),
    [
        (("one", "two"), ("one", "two"), ()),
        ((), (), ()),
        (None, (), ("output: the supervisor does not run this process",)),
        ("never", (), ("output: its supervisor has not answered within 0.05 s",)),
    ],
)
async def test_what_it_wrote_last(
    monkeypatch: pytest.MonkeyPatch,
    lines: tuple[str, ...] | str | None,
    output: tuple[str, ...],
    missing: tuple[str, ...],
):
    monkeypatch.setattr(evidence, "_probe", lambda *_: SEEN)

    monkeypatch.setattr(evidence, "OUTPUT_WITHIN_S", 0.05 if lines == "never" else PATIENCE_S)

    async def last() -> Any:
        return await asyncio.Future() if lines == "never" else lines

    seen = await probe_with_output(OWN, last())
    assert seen == replace(SEEN, output=output, missing=(*SEEN.missing, *missing))


async def test_a_proc_that_hangs_costs_nothing_else(monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    monkeypatch.setattr(evidence, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(evidence, "_probe", lambda *_: go_on.wait(PATIENCE_S) and SEEN)
    seen = await probe(OWN)
    go_on.set()
    late = "/proc has not answered within 0.05 s"
    assert seen == ProcessSnapshot(missing=(f"stacks: {late}", f"process: {late}"))


async def test_a_defect_here_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evidence, "_probe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await probe(OWN)


MAIN = ThreadState(77, "pt_main_thread", "T", 12.34, 0.5, "do_signal_stop")


def workers(*tids: int) -> tuple[ThreadState, ...]:
    return tuple(ThreadState(tid, "worker (1)", "S", 0.1, 0.05, "futex_wait") for tid in tids)


class TestInWords:
    def test_a_stopped_process(self):
        state = ProcessState(77, "T", 0, 524288, (MAIN, *workers(80), ThreadState(81, "spin", "R", 60.0, 0.0)))
        assert str(state).splitlines() == [
            "pid 77 (pt_main_thread): T (stopped), VmRSS 512.0 MiB, threads: 3",
            "main thread: T (stopped), wchan do_signal_stop, utime 12.3 s, stime 0.5 s",
            "thread worker (1) (80): S (sleeping), wchan futex_wait, utime 0.1 s, stime 0.1 s",
            "thread spin (81): R (running), utime 60.0 s, stime 0.0 s",
        ]
        assert state.is_stopped

    def test_threads_that_are_alike_are_one_line(self):
        state = ProcessState(77, "R", 0, None, (MAIN, *workers(*range(100, 164))))
        head, _, line = str(state).splitlines()
        assert head == "pid 77 (pt_main_thread): R (running), no memory, threads: 65"
        assert line.startswith("64 threads worker (1) (100, 101, 102, 103, ...): S (sleeping), wchan futex_wait, ")
        assert line.endswith("utime 6.4 s, stime 3.2 s")

    def test_which_signals_are_handled(self):
        state = ProcessState(77, "S", 1 << 43 | 1, 1, (MAIN,))
        assert [number for number in range(1, 65) if state.handles(number)] == [1, 44]


class TestReading:
    def test_this_process(self):
        done = threading.Event()
        thread = threading.Thread(target=done.wait, args=(PATIENCE_S,))
        thread.start()
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            state = read_process(os.getpid())
        finally:
            signal.signal(signal.SIGUSR1, before)
            done.set()
            thread.join()
        assert (state.pid, state.threads[0].tid, state.threads[0].state) == (os.getpid(), os.getpid(), "R")
        assert thread.native_id in [found.tid for found in state.threads]
        assert state.handles(signal.SIGUSR1)
        assert not state.handles(signal.SIGKILL)
        assert not state.is_stopped
        assert state.rss_kib is not None
        assert state.rss_kib > 1024
        assert state.threads[0].utime_s > 0

    def test_a_name_may_be_anything(self, tmp_path: Path):
        numbers = " ".join(map(str, range(4, 53)))
        (tmp_path / "stat").write_text(f"12 (a) R (b ) S {numbers}\n")
        thread = read_thread(tmp_path)
        assert (thread.tid, thread.name, thread.state, thread.wchan) == (12, "a) R (b ", "S", "")
        ticks = os.sysconf("SC_CLK_TCK")
        assert (thread.utime_s, thread.stime_s) == (14 / ticks, 15 / ticks)

    def test_a_process_that_is_gone(self):
        with pytest.raises(OSError, match="No such"):
            read_process(2**30)


NUMBER = signal.SIGRTMIN + 12
# On SIGUSR1 it does what its argument says.
STAND_IN = f"""
import faulthandler, fcntl, os, signal, sys, time
import lighthouse_protocol.messages.incident
file = os.memfd_create(lighthouse_protocol.messages.incident.STACKS_FILE)
fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
faulthandler.register({NUMBER}, file=file)
def change(*_):
    if sys.argv[1] == "unregister":
        faulthandler.unregister({NUMBER})
    else:
        os.dup2(os.open("/dev/null", os.O_RDWR), file)
    print("changed", flush=True)
signal.signal(signal.SIGUSR1, change)
def stuck_in_here():
    print("descriptor", file, flush=True)
    while True:
        time.sleep(60)
stuck_in_here()
"""


class StandIn(Process):
    def __init__(self, change: str = "") -> None:
        super().__init__(STAND_IN, [change])

    def ready(self) -> None:
        self.offer = EvidenceOffer(NUMBER, int(self.wait_for_log(r"^descriptor (\d+)$")[1]))

    def change(self) -> None:
        self.signal(signal.SIGUSR1)
        self.wait_for_log("^changed$")

    def stacks(self, offer: EvidenceOffer | None = None, within_s: float = PATIENCE_S) -> str:
        with process_descriptor(self.pid, started_at(self.pid)) as descriptor:
            assert descriptor is not None
            return take_stacks(descriptor, read_process(self.pid), offer or self.offer, within_s)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as process:
        yield process


def test_what_a_process_does_as_often_as_it_is_asked(stand_in: StandIn):
    for _ in range(2):
        stacks = stand_in.stacks()
        assert "in stuck_in_here" in stacks
        assert stacks.count("in <module>") == 1, "those of earlier times are gone"
    assert stand_in.is_alive


@pytest.mark.parametrize(("change", "why"), [("unregister", "would kill it"), ("close", "has closed the file")])
def test_a_process_that_has_no_handler_any_more_is_never_signalled(change: str, why: str):
    with StandIn(change) as process:
        assert read_process(process.pid).handles(NUMBER)
        process.change()
        with pytest.raises(NoStacksError, match=why):
            process.stacks()
        assert process.is_alive


def test_a_stopped_process_is_not_waited_for(stand_in: StandIn):
    began_at = time.monotonic()
    with stand_in.paused():
        eventually(lambda: read_process(stand_in.pid).is_stopped)
        with pytest.raises(NoStacksError, match="it is stopped"):
            stand_in.stacks()
    assert time.monotonic() - began_at < PATIENCE_S / 2


def test_one_that_offers_no_handler_or_one_that_writes_nothing(stand_in: StandIn):
    """SIGUSR1 is handled, too, but writes to the log."""
    with pytest.raises(NoStacksError, match="no handler that writes its stacks"):
        stand_in.stacks(EvidenceOffer())
    with pytest.raises(NoStacksError, match=r"written nothing within 0\.1 s"):
        stand_in.stacks(EvidenceOffer(signal.SIGUSR1, stand_in.offer.descriptor), 0.1)


def test_one_that_has_ended(stand_in: StandIn):
    pid, started, state = stand_in.pid, started_at(stand_in.pid), read_process(stand_in.pid)
    with contextlib.ExitStack() as held:
        descriptor = held.enter_context(process_descriptor(pid, started))
        assert descriptor is not None
        os.kill(pid, signal.SIGKILL)
        stand_in.wait()
        with pytest.raises(NoStacksError, match=f"of process {pid}: "):
            take_stacks(descriptor, state, stand_in.offer, PATIENCE_S)
    with process_descriptor(pid, started) as gone:
        assert gone is None
