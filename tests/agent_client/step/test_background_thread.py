"""The background thread: one thing after the other, and every failure goes to whoever waits for it."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from agent_client.step.runner import BackgroundThread
from tests.processes import PATIENCE_S, eventually


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    thread = BackgroundThread("under test")
    yield thread
    thread.close(PATIENCE_S)


def ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "under test"]


def test_tasks_run_in_order_on_one_thread_of_that_name(thread: BackgroundThread) -> None:
    ran: list[tuple[int, str]] = []
    futures = [thread.submit(lambda n=n: ran.append((n, threading.current_thread().name)) or n * n) for n in range(100)]
    assert [future.result(PATIENCE_S) for future in futures] == [n * n for n in range(100)]
    assert ran == [(n, "under test") for n in range(100)]


def test_it_is_idle_as_soon_as_a_future_says_so_and_not_before(thread: BackgroundThread) -> None:
    assert thread.is_idle
    may_end = threading.Event()
    first, second = thread.submit(may_end.wait), thread.submit(lambda: "after")
    assert not thread.is_idle
    was_idle: list[bool] = []
    second.add_done_callback(lambda _: was_idle.append(thread.is_idle))
    may_end.set()
    first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    eventually(lambda: was_idle == [True], "the callback has run")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_belongs_to_its_future_and_the_next_task_runs(thread: BackgroundThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    failed, fine = thread.submit(fail), thread.submit(lambda: "fine")
    assert failed.exception(PATIENCE_S) is error
    assert fine.result(PATIENCE_S) == "fine"


def test_close_waits_no_longer_than_it_is_told() -> None:
    thread = BackgroundThread("under test")
    may_end = threading.Event()
    hanging = thread.submit(may_end.wait)
    began_at = time.monotonic()
    thread.close(0.05)
    assert 0.05 <= time.monotonic() - began_at < PATIENCE_S
    assert not hanging.done()
    assert [each.daemon for each in ours()] == [True], "it must not keep the interpreter from ending"
    may_end.set()
    assert hanging.result(PATIENCE_S)
    eventually(lambda: not ours(), "the thread has ended")


def test_a_task_can_submit_another(thread: BackgroundThread) -> None:
    inner = thread.submit(lambda: thread.submit(lambda: "inner")).result(PATIENCE_S)
    assert inner.result(PATIENCE_S) == "inner"


def test_nothing_is_kept_of_a_task_that_is_done(thread: BackgroundThread) -> None:
    class Big:
        pass

    def use(big: Big) -> None:
        assert big is not None

    big = Big()
    kept = weakref.ref(big)
    thread.submit(lambda big=big: use(big)).result(PATIENCE_S)
    del big
    eventually(lambda: gc.collect() is not None and kept() is None, "the task's argument is freed", 10.0)


def test_a_callback_of_the_future_runs_before_the_next_task(thread: BackgroundThread) -> None:
    """A gradient bucket is handed back to torch there, in the order of the buckets."""
    order: list[str] = []
    may_begin = threading.Event()
    thread.submit(may_begin.wait)
    thread.submit(lambda: order.append("first")).add_done_callback(lambda _: order.append("its callback"))
    last = thread.submit(lambda: order.append("second"))
    may_begin.set()
    last.result(PATIENCE_S)
    assert order == ["first", "its callback", "second"]
