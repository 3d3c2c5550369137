"""A function is ended from another thread, whatever it does in Python, and nothing of it arrives later."""

import contextlib
import importlib
import multiprocessing.util
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_client.restart import interrupter
from agent_client.restart.interrupter import InterruptibleSection, Interruption
from agent_client.step.stop_signals import uninterrupted


def never() -> bool:
    return False


def interrupted(function: Callable[[], object], *, again: bool = False) -> float:
    """How long after the first interruption it ended."""
    section = InterruptibleSection()
    at: list[float] = []
    has_ended = threading.Event()

    def interrupt() -> None:
        time.sleep(0.05)
        at.append(time.monotonic())
        section.interrupt()
        while again and not has_ended.wait(0.05):
            section.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(Interruption):
            section.run(function, never)
        return time.monotonic() - at[0]
    finally:
        has_ended.set()
        section.stop_delivery()
        thread.join()


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    for _ in range(3):
        with contextlib.suppress(BaseException):
            spin()
    spin()


def catch_exceptions() -> None:
    with contextlib.suppress(Exception):
        spin()
    spin()


@pytest.mark.parametrize(
    "function",
    [spin, lambda: time.sleep(60), threading.Event().wait, queue.SimpleQueue[int]().get, catch_exceptions],
    ids=["python", "sleep", "event", "queue", "except Exception"],
)
def test_what_runs_or_waits_is_ended(function: Callable[[], object]) -> None:
    assert interrupted(function) < 10


def test_what_swallows_it_is_ended_by_a_later_one() -> None:
    interrupted(swallow, again=True)


def test_a_thread_that_is_not_the_main_one() -> None:
    ended: list[bool] = []

    def live() -> None:
        section = InterruptibleSection()
        threading.Timer(0.05, section.interrupt).start()
        try:
            section.run(spin, never)
        except Interruption:
            section.stop_delivery()
            ended.append(True)

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(60)
    assert ended == [True]


def test_what_is_over_does_not_begin() -> None:
    section = InterruptibleSection()
    with pytest.raises(Interruption):
        section.run(lambda: pytest.fail("it began"), lambda: True)
    assert not section.interrupt()


def test_nothing_arrives_outside_of_a_section() -> None:
    """An interrupter that never tires, against sections that end at every moment."""
    section = InterruptibleSection()
    stop = threading.Event()
    counts = {"returned": 0, "interrupted": 0}

    def interrupt() -> None:
        while not stop.is_set():
            section.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        ends_at = time.monotonic() + 60.0
        while (counts["interrupted"] < 200 or counts["returned"] < 20) and time.monotonic() < ends_at:
            try:
                section.run(lambda: sum(number for number in range(random.randrange(20_000))), never)
                counts["returned"] += 1
            except Interruption:
                section.stop_delivery()
                counts["interrupted"] += 1
            for _ in range(50):  # here an exception would fail the test
                pass
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert counts["interrupted"] >= 200, counts


def test_its_value_and_its_error_are_the_functions() -> None:
    section = InterruptibleSection()
    assert section.run(lambda: 7, never) == 7
    with pytest.raises(ZeroDivisionError):
        section.run(lambda: 1 // 0, never)
    assert not section.interrupt()


def test_an_import_is_not_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of half its names would stay broken for every later run of the function."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def import_and_spin() -> None:
        importlib.import_module("slow_to_import")
        spin()

    assert interrupted(import_and_spin, again=True) > 0.3
    assert sys.modules["slow_to_import"].whole


def test_what_has_to_be_done_whole_is_ended_after_that() -> None:
    done: list[str] = []

    @uninterrupted
    def close() -> None:
        time.sleep(0.3)
        done.append("closed")

    def function() -> None:
        close()
        spin()

    assert interrupted(function, again=True) >= 0.2
    assert done == ["closed"]


@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "other thread"])
def test_no_lock_stays_taken(is_main: bool) -> None:
    """gRPC's threads take the same conditions as the function: they would wait for them without end."""
    section, condition, rounds = InterruptibleSection(), threading.Condition(), 20
    held, taken, free = threading.Event(), threading.Event(), list[bool]()

    def interrupt() -> None:
        for _ in range(rounds):
            with condition:
                held.set()
                time.sleep(0.05)  # the function waits for the lock
            section.interrupt()  # it has the lock, but not the interpreter's
            assert taken.wait(10)
            taken.clear()
            section.interrupt()
            free.append(condition.acquire(timeout=5.0))
            condition.release()

    def function() -> None:
        assert held.wait(10)
        with condition:
            held.clear()
            taken.set()
        spin()

    def live() -> None:
        for _ in range(rounds):
            with pytest.raises(Interruption):
                section.run(function, never)
            section.stop_delivery()

    threads = [threading.Thread(target=act, daemon=True) for act in ([interrupt] if is_main else [interrupt, live])]
    for thread in threads:
        thread.start()
    if is_main:
        live()
    for thread in threads:
        thread.join(60)
    assert free == [True] * rounds


def test_a_with_block_is_entered_and_left_whole() -> None:
    done: list[str] = []

    class Block:
        def __enter__(self) -> None:
            time.sleep(0.3)
            done.append("entered")

        def __exit__(self, *_: object) -> None:
            time.sleep(0.3)
            done.append("left")

    def function() -> None:
        with Block():
            pass
        spin()

    assert interrupted(function, again=True) >= 0.2
    assert done == ["entered", "left"]


def test_a_signal_that_nobody_has_handled_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come between the interpreter's last look and a wait that then began."""
    section, sent = InterruptibleSection(), list[int]()

    def lose_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            pthread_kill(thread, number)

    pthread_kill = interrupter.signal.pthread_kill
    monkeypatch.setattr(interrupter.signal, "pthread_kill", lose_the_first)

    def function() -> None:
        for _ in range(100):
            section.interrupt()
            time.sleep(0.02)

    with pytest.raises(Interruption):
        section.run(function, never)
    assert len(sent) == 2


class Finalized:
    """What a DataLoader's iterator does: its workers are told to end, and waited for."""

    def __init__(self, takes_s: float, done: list[str]) -> None:
        self._takes_s, self._done = takes_s, done

    def __del__(self) -> None:
        time.sleep(self._takes_s)
        self._done.append("finalised")


def finalize(takes_s: float, done: list[str]) -> None:
    left = Finalized(takes_s, done)
    del left


def call_back(takes_s: float, done: list[str]) -> None:
    """As multiprocessing closes the descriptors of a process."""
    left = threading.Event()
    multiprocessing.util.Finalize(left, lambda: (time.sleep(takes_s), done.append("finalised")))
    del left


def hand_over(takes_s: float, done: list[str]) -> None:
    """As a tensor comes from a DataLoader's worker: by a descriptor."""
    code = "def receive():\n    sleep(takes_s)\n    done.append('finalised')"
    names = {"__name__": "multiprocessing.reduction", "sleep": time.sleep, "takes_s": takes_s, "done": done}
    exec(code, names)
    names["receive"]()


BRIEF = pytest.mark.parametrize("brief", [finalize, call_back, hand_over])


@pytest.mark.filterwarnings("error")
@BRIEF
def test_what_is_brief_is_not_torn(brief: Callable[[float, list[str]], None]) -> None:
    """What is raised in a finaliser would be swallowed, and told on standard error."""
    done: list[str] = []

    def function() -> None:
        brief(0.3, done)
        spin()

    assert interrupted(function, again=True) >= 0.2
    assert done == ["finalised"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@BRIEF
def test_what_should_be_brief_and_hangs_is_ended_later(
    brief: Callable[[float, list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupter, "BRIEF_S", 0.3)
    done: list[str] = []

    def hang() -> None:
        brief(60.0, done)
        spin()

    assert 0.2 < interrupted(hang, again=True) < 30
    assert not done
