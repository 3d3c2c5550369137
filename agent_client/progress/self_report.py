"""What this process is doing, for those that ask its manager: its Python stacks, and torch's newest collectives.

It says so itself as long as it runs Python. While C code holds the interpreter lock it cannot: for that, faulthandler
writes the stacks when a real-time signal comes, which needs no lock. They go to a file without a name; the manager
sends the signal and reads the file. It does so only where nothing was said: faulthandler walks the stacks of other
threads as they are, and would crash at times if these ran Python meanwhile (tried: after some hundred signals).

A forked child has the handler and the file, too, which does no harm: the signal is never sent to it. A script's own
faulthandler.enable() stays as it is.
"""

import faulthandler
import fcntl
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lighthouse_protocol.messages.evidence import MAX_FLIGHT_RECORDER_BYTES, STACKS_FILE, SelfReport
from lighthouse_protocol.messages.session import EvidenceOffer

log = logging.getLogger(__name__)

NEWEST_ENTRIES = 20
MAX_FRAMES = 100
RECORDED_WITHIN_S = 1.0
# The C library keeps the first few of them for itself, and others take theirs from either end.
_SIGNALS = range(signal.SIGRTMIN + 10, signal.SIGRTMAX - 4)
_RECORDER = "torch._C._distributed_c10d"

_offered: dict[int, EvidenceOffer] = {}


def offer() -> EvidenceOffer:
    """What this process can be asked for; the first call of a process sets its handler up."""
    pid = os.getpid()
    if pid not in _offered:
        _offered.clear()  # of the process that this one was forked from
        _offered[pid] = _register()
    return _offered[pid]


def _register() -> EvidenceOffer:
    try:
        number = _free_signal(_SIGNALS)
        descriptor = os.memfd_create(STACKS_FILE)
        # Its reader empties it; what comes next then stands at its beginning.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(number, file=descriptor, all_threads=True)
    except (OSError, AttributeError, ValueError, RuntimeError) as e:
        log.warning("stacks of this process are only available while it runs Python: %s", e)
        return EvidenceOffer()
    return EvidenceOffer(number, descriptor)


def _free_signal(candidates: Iterable[int]) -> int:
    """One without a handler that is not ignored either. Raises ValueError where there is none."""
    status = Path("/proc/self/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.MULTILINE)]
    taken = masks[0] | masks[1]
    for number in candidates:
        if not taken >> (number - 1) & 1:
            return number
    raise ValueError("every real-time signal has a handler already")


# -- asked


class SelfReporter:
    """On threads of its own: torch may hang while it reports a collective that does, and the caller must not."""

    def __init__(self) -> None:
        self._reading: threading.Thread | None = None
        self._read = "", ""

    def answer(self, number: int, send: Callable[[SelfReport], None]) -> None:
        """Whatever torch does, an answer is sent soon, if Python runs at all."""
        threading.Thread(target=lambda: send(self._look(number)), name="lighthouse look", daemon=True).start()

    def _look(self, number: int) -> SelfReport:
        stacks = own_stacks()
        if self._reading is None or not self._reading.is_alive():  # an earlier one may hang
            self._reading = threading.Thread(target=self._read_recorder, name="lighthouse recorder", daemon=True)
            self._reading.start()
        self._reading.join(RECORDED_WITHIN_S)
        if self._reading.is_alive():
            return SelfReport(
                number, stacks, "", (f"Flight Recorder: no answer from torch within {RECORDED_WITHIN_S:g} s",)
            )
        text, why = self._read
        return SelfReport(number, stacks, text, (why,) if why else ())

    def _read_recorder(self) -> None:
        self._read = recorded()


def own_stacks() -> str:
    """Of all threads but this one, the main one last; in the form of faulthandler, with names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    ordered = sorted(frames.items(), key=lambda entry: entry[0] == main)
    return "\n".join("".join(_lines(ident, names.get(ident, ""), frame)) for ident, frame in ordered)


def _lines(ident: int, name: str, frame: FrameType | None) -> Iterable[str]:
    yield f"Thread 0x{ident:016x} {name} (most recent call first):\n"
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
        frame = frame.f_back
    yield "  ...\n"


def recorded() -> tuple[str, str]:
    """The newest collectives, and why there are none."""
    try:
        text = flight_recorder()
    except Exception as e:  # whatever this version of torch raises
        log.exception("cannot read the Flight Recorder")
        return "", f"Flight Recorder: {e!r}"
    return text, "" if text else "Flight Recorder: this process has recorded no collective"


def flight_recorder() -> str:
    """JSON: the newest collectives, the newest last; empty without any."""
    entries = [entry for dump in read_recorders(with_entries=True) for entry in dump.get("entries") or ()]
    return shortened(sorted(entries, key=lambda entry: entry.get("time_created_ns", 0)), time.time())


def read_recorders(*, with_entries: bool) -> list[dict[str, Any]]:
    """NCCL has one of its own, unless torch is so new that all have one. torch is not imported for that."""
    module: ModuleType | None = sys.modules.get(_RECORDER)
    dumps = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [json.loads(text) for text in dict.fromkeys(dump(with_entries) for dump in dumps if dump is not None)]


def shortened(entries: Iterable[dict[str, Any]], now_unix_s: float) -> str:
    """JSON of the newest ones, with the fields that help, and no more of them than a message takes."""
    shown = [_shown(entry, now_unix_s) for entry in list(entries)[-NEWEST_ENTRIES:]]
    while len(json.dumps(shown)) > MAX_FLIGHT_RECORDER_BYTES:
        del shown[0]
    return json.dumps(shown) if shown else ""


def _shown(entry: dict[str, Any], now_unix_s: float) -> dict[str, Any]:
    """`state` is torch's own; gloo leaves it at scheduled for ever. `retired`: it is over."""
    name, description = (*entry.get("process_group", ()), "", "")[:2]
    created_ns = entry.get("time_created_ns", 0)
    return {
        "group": description or name or f"#{entry.get('pg_id', 0)}",
        "seq": entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0),
        "operation": entry.get("profiling_name", ""),
        "input_sizes": entry.get("input_sizes", []),
        "output_sizes": entry.get("output_sizes", []),
        "dtypes": entry.get("input_dtypes", []),
        "state": entry.get("state", ""),
        "retired": bool(entry.get("retired")),
        "age_s": round(max(0.0, now_unix_s - created_ns / 1e9), 3) if created_ns else None,
    }
