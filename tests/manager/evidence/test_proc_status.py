"""What /proc says of a process, as a person reads it."""

import os
import signal
import threading
from pathlib import Path

import pytest

from manager.evidence.process_probe import ProcessState, ThreadState, read_process, read_thread
from tests.processes import PATIENCE_S

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
