"""The Python stacks of a process of this host, also while it runs no Python: a signal has them written to a file of it.

The signal would end a process that has no handler for it. So it is sent by a descriptor of the process, never by its
pid, and only while the kernel shows a handler and the file is the one that was offered. It blocks.
"""

import contextlib
import os
import signal
import time
from collections.abc import Generator

from lighthouse_protocol.messages.evidence import STACKS_FILE
from lighthouse_protocol.messages.session import EvidenceOffer
from manager.evidence.proc_status import ProcessState

_FILE = f"/memfd:{STACKS_FILE}"
_POLL_S = 0.01
# They come in many small writes, and a busy host may hold those up.
_REST_S = 0.2
_MOST_BYTES = 1 << 20


class NoStacksError(Exception):
    """Says why."""


def take_stacks(descriptor: int, state: ProcessState, offer: EvidenceOffer, within_s: float) -> str:
    """`descriptor` is a pidfd. Raises NoStacksError."""
    if not offer.signal:
        raise NoStacksError("it has no handler that writes them")
    if state.is_stopped:
        raise NoStacksError("it is stopped, and runs no handler")
    if not state.handles(offer.signal):
        raise NoStacksError(f"it has no handler for signal {offer.signal} any more, and would end by it")
    try:
        with _opened(state.pid, offer.descriptor) as file:
            os.ftruncate(file, 0)  # of an earlier time
            signal.pidfd_send_signal(descriptor, offer.signal)
            return _written(file, time.monotonic() + within_s, within_s)
    except OSError as e:
        raise NoStacksError(f"of process {state.pid}: {e}") from e


@contextlib.contextmanager
def _opened(pid: int, number: int) -> Generator[int, None, None]:
    """A descriptor that a script has closed may be another file by now."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(_FILE):
        raise NoStacksError("it has closed the file for them")
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _written(file: int, ends_at: float, within_s: float) -> str:
    """All that is there once nothing is added any more."""
    size, rests_at = 0, ends_at
    while (now := time.monotonic()) < min(ends_at, rests_at):
        if (grown := os.fstat(file).st_size) > size:
            size, rests_at = grown, now + _REST_S
        time.sleep(_POLL_S)
    if not size:
        raise NoStacksError(f"its handler has written nothing within {within_s:g} s")
    return os.pread(file, min(size, _MOST_BYTES), 0).decode(errors="replace")
