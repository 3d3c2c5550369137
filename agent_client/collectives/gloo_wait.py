"""Waiting for work of gloo that may never end.

When a connection ends, gloo tells those who wait for its peer, but not a send that lies in its queue
(gloo/transport/tcp/pair.cc, signalException): that work ends by its timeout only. So a wait is given up once its group
was aborted, here or by a peer, as soon as nothing can write to its tensors any more: no connection is left, and gloo's
threads are at rest. One of them has been seen to keep running after an abort. It is given SPINS_S, long enough to read
what was left in the sockets' buffers.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

SLICE_S = 0.05
SPINS_S = 5.0
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
_GIVEN_UP = "the process group was aborted, and gloo did not end what was under way in it"
LET_GO_WITHIN_S = 1.0
THREADS = {"pt_gloo_runloop", "gloo_tcp_loop"}


def wait(work: Any, backend: Any, is_aborted: Callable[[], bool], limit_s: float = math.inf) -> None:
    """Until `work` of `backend` has ended. Raises RuntimeError if it has failed, was given up, or after `limit_s`."""
    began_at, aborted_at = time.monotonic(), None
    while not _ends_within(work, SLICE_S):
        now = time.monotonic()
        if not is_aborted():
            if now - began_at > limit_s:
                raise RuntimeError(f"the collective did not end within {limit_s:g} s")
            continue
        aborted_at = now if aborted_at is None else aborted_at
        if (are_at_rest() or now - aborted_at >= SPINS_S) and not _ends_within(work, SLICE_S):
            keep([work], backend)
            raise RuntimeError(_GIVEN_UP)


def keep(works: Sequence[Any], backend: Any) -> None:
    """`backend` for as long as one of its `works` is under way: its destructor waits for them."""
    if not all(work.is_completed() for work in works):
        threading.Thread(target=_outlive, args=(works, backend), name="gloo remains", daemon=True).start()


def keep_briefly(works: Iterable[Any]) -> None:
    """The newest `works` of a group that ends, until gloo's threads have let go of them.

    A thread of gloo that is the last to hold one needs the interpreter's lock to free its tensors. What ends the group
    in C++, such as DDP's reducer, holds that lock and waits for the thread: for good.
    """
    timer = threading.Timer(LET_GO_WITHIN_S, list[Any].clear, [list(works)])
    timer.name, timer.daemon = "gloo remains", True
    timer.start()


def _outlive(works: Sequence[Any], _backend: Any) -> None:
    """Not by work.wait(): a thread that returns from there while the interpreter ends ends the process by SIGABRT."""
    pause_s = FIRST_PAUSE_S  # most end at once
    while not all(work.is_completed() for work in works):
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def wait_in_thread(work: Any, is_aborted: Callable[[], bool], timeout: timedelta) -> None:
    """The same for a message, whose wait cannot be cut in pieces: a thread waits for as long as it takes."""
    outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
    threading.Thread(target=_report, args=(work, timeout, outcome), name="gloo message", daemon=True).start()
    while True:
        was_aborted = is_aborted()
        with contextlib.suppress(queue.Empty):
            error = outcome.get(timeout=SLICE_S)
            break
        if was_aborted:
            raise RuntimeError(_GIVEN_UP)
    if error is not None:
        raise error


def _report(work: Any, timeout: timedelta, outcome: "queue.SimpleQueue[RuntimeError | None]") -> None:
    try:
        work.wait(timeout)
    except RuntimeError as e:
        outcome.put(e)
    else:
        outcome.put(None)


def _ends_within(work: Any, timeout_s: float) -> bool:
    """Raises RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended well in this very moment
    return True


def are_at_rest(tasks: Path = Path("/proc/self/task")) -> bool:
    """All of gloo's threads in this process wait for something."""
    states = [state for name, state in map(_look_at, tasks.iterdir()) if name in THREADS]
    return bool(states) and set(states) == {"S"}


def _look_at(task: Path) -> tuple[str, str]:
    """(name, state as in proc(5)) of a thread; it may have ended by now."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return "", ""
    return name, rest.split()[0]
