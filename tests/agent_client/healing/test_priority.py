"""A thread that nobody waits for."""

import os
import threading
import time

import pytest

from agent_client.healing.connection import NICENESS, WORKS_S, Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[what the thread has worked, what it has slept]."""
    seconds = [5.0, 0.0]

    def sleep(s: float) -> None:
        seconds[1] += s

    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(time, "thread_time", lambda: seconds[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return seconds


def test_it_rests_as_long_as_it_works(clock: list[float]) -> None:
    pace = Pace()
    for _ in range(100):
        clock[0] += 0.75 * WORKS_S
        pace.rest()
    assert clock[1] == pytest.approx(clock[0] - 5.0)


def test_who_waits_for_others_needs_no_rest(clock: list[float]) -> None:
    pace = Pace()
    clock[0] += 0.9 * WORKS_S
    for _ in range(100):
        pace.rest()
    assert clock[1] == 0.0


def test_only_its_own_thread_has_a_lower_priority() -> None:
    found: list[int] = []

    def run() -> None:
        Pace()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [NICENESS] or before > NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
