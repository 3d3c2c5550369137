"""Work of gloo that never ends by itself: given up once it was aborted, and not before it is safe."""

import os
import random
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from agent_client.collectives import gloo
from agent_client.collectives.gloo import GlooGroup
from tests.processes import LOCALHOST, PATIENCE_S, eventually

ROUNDS = 25  # without gloo_wait, about one of seven waits until gloo's timeout
GLOO_TIMEOUT_S = 60.0
ABORTS_WITHIN_S = 20.0  # milliseconds where the machine is free


class Trio:
    """Three ranks in threads of this process that sum one small tensor after the other."""

    def __init__(self, store: TCPStore, name: str) -> None:
        self.groups: list[GlooGroup] = []
        self.ended_at: list[float] = []
        self._all_met = Barrier(4, timeout=PATIENCE_S)
        self._threads = [Thread(target=self._sum, args=(store.port, name, rank), daemon=True) for rank in range(3)]
        for thread in self._threads:
            thread.start()
        self._all_met.wait()

    def _sum(self, port: int, name: str, rank: int) -> None:
        store = TCPStore(LOCALHOST, port, is_master=False, wait_for_workers=False)
        limits = {"connect_timeout_s": PATIENCE_S, "timeout_s": GLOO_TIMEOUT_S}
        group = GlooGroup(PrefixStore(name, store), rank, 3, LOCALHOST, **limits)
        self.groups.append(group)
        self._all_met.wait()
        tensor = torch.ones(1000)
        with pytest.raises(RuntimeError):
            while True:
                group.all_reduce(tensor)
        self.ended_at.append(time.monotonic())

    def join(self, within_s: float) -> None:
        ends_at = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))


@pytest.fixture(scope="module")
def served() -> TCPStore:
    return TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)


def test_a_descriptor_that_is_no_socket_any_more_is_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may open a file under its number in the meantime. An open copy of a pipe would hide its end."""
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(gloo, "_descriptors", lambda: {"socket:[1]": file.fileno()})
        before = os.listdir("/proc/self/fd")
        assert gloo.store_connections(frozenset(), 1).has_shut_down() is False
        assert os.listdir("/proc/self/fd") == before


def test_an_abort_of_one_at_any_moment_ends_every_rank(served: TCPStore) -> None:
    rng = random.Random(1)
    for number in range(ROUNDS):
        trio = Trio(served, str(number))
        time.sleep(rng.uniform(0.001, 0.01))
        rng.choice(trio.groups).abort()
        trio.join(ABORTS_WITHIN_S)
        assert len(trio.ended_at) == 3, f"round {number}: a rank waits on"
        for group in trio.groups:
            group.abort()  # closes what it holds


class FakeWork:
    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.ended = threading.Event()
        self.ends_after_timeouts: int | None = None
        self.timeouts = 0

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended.wait(timeout.total_seconds()):
            self.timeouts += 1
            if self.timeouts == self.ends_after_timeouts:
                self.ended.set()
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def remains() -> set[Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gloo remains"}


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the next looks at gloo's threads find; the last one for ever."""
    looks = [True]
    monkeypatch.setattr(gloo, "are_threads_idle", lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    monkeypatch.setattr(gloo, "SLICE_S", 0.01)
    monkeypatch.setattr(gloo, "MAX_PAUSE_S", 0.01)
    return looks


def test_what_was_not_aborted_is_waited_for(at_rest: list[bool]) -> None:
    work = FakeWork()
    work.ends_after_timeouts = 20
    gloo.wait(work, None, lambda: False)
    assert work.timeouts == 20


def test_what_was_aborted_is_waited_for_while_a_thread_of_gloo_runs_and_then_lives_until_it_has_ended(
    at_rest: list[bool],
) -> None:
    """Its backend, too: its destructor would wait for the work, in whichever thread."""
    at_rest[:] = [False] * 10 + [True]
    before, work = remains(), FakeWork()
    with pytest.raises(RuntimeError, match="was aborted"):
        gloo.wait(work, "a backend", lambda: True)
    assert work.timeouts == 12
    assert remains() - before
    work.ended.set()
    eventually(lambda: not remains() - before)


def test_one_that_never_rests_is_waited_for_so_long_only(at_rest: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "SPINS_S", 0.1)
    at_rest[:] = [False]
    before, work = remains(), FakeWork()
    with pytest.raises(RuntimeError, match="was aborted"):
        gloo.wait(work, None, lambda: True)
    work.ended.set()
    eventually(lambda: not remains() - before)


def test_what_ends_well_in_the_moment_of_a_timeout_has_ended_well(at_rest: list[bool]) -> None:
    work = FakeWork()
    work.ends_after_timeouts = 1
    gloo.wait(work, None, lambda: True)


def test_what_fails_says_why(at_rest: list[bool]) -> None:
    work = FakeWork("Connection closed by peer")
    work.ends_after_timeouts = 3
    with pytest.raises(RuntimeError, match="closed by peer"):
        gloo.wait(work, None, lambda: False)


@pytest.mark.parametrize(
    ("threads", "rest"),
    [
        ([("pt_gloo_runloop", "S"), ("gloo_tcp_loop", "S"), ("python", "R")], True),
        ([("pt_gloo_runloop", "S"), ("gloo_tcp_loop", "R")], False),
        ([("pt_gloo_runloop", "D"), ("gloo_tcp_loop", "S")], False),
        ([("a (strange) name", "R"), ("pt_gloo_runloop", "S"), ("gloo_tcp_loop", "S")], True),
        ([("python", "S"), ("python", "S")], True),
        ([("python", "S"), ("python", "R")], False),
        ([("pt_gloo_runloop", "S"), ("python", "R")], False),
        ([], False),
    ],
)
def test_at_rest_are_threads_that_all_wait(tmp_path: Path, threads: list[tuple[str, str]], rest: bool) -> None:
    for number, (name, state) in enumerate(threads):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2 3")
    started_here = tmp_path / str(threading.get_native_id())
    started_here.mkdir()
    (started_here / "stat").write_text("1 (python) R 1 2 3")
    (tmp_path / "ended").mkdir()
    assert gloo.are_threads_idle(tmp_path) is rest


def test_the_newest_work_of_a_group_that_ends_is_kept_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gloo's thread may be the last to hold it, and need the interpreter's lock while the group's end holds it."""

    class Work:
        pass

    monkeypatch.setattr(gloo, "LET_GO_WITHIN_S", 0.2)
    work = Work()
    alive = weakref.ref(work)
    gloo.release_later([work])
    del work
    assert alive() is not None
    eventually(lambda: alive() is None, "it is let go")
