"""Finds out what a process is doing, from counts of torch's collectives, the Flight Recorder, and Python stacks.

torch counts the collectives of each process group in C++, including DDP's and FSDP's, so counting is free until a
sample reads the counts. The Flight Recorder describes the collectives that are still running. Reading all of its
entries takes about 40 ms, so it is read only after a time without progress. A separate thread reads it, because torch
may hang while it describes a collective that hangs.

When the manager requests evidence, a process reports its Python stacks and its latest collectives. This works only if
the process can run Python code. If C code holds the GIL, the manager sends a real-time signal instead, and faulthandler
writes the stacks to an anonymous file, which requires no lock. The signal is a last resort, because faulthandler reads
the stacks of running threads, and crashed in tests after a few hundred signals.

This module never imports torch. It uses torch only if the script has imported it.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lighthouse_protocol.messages.incident import MAX_FLIGHT_RECORDER_BYTES, STACKS_FILE, SelfReport
from lighthouse_protocol.messages.progress import MAX_BEFORE, MAX_GROUPS, MAX_LABEL_CHARS, MAX_NAME_CHARS, GroupCalls
from lighthouse_protocol.messages.session import EvidenceOffer

log = logging.getLogger(__name__)

NEWEST_ENTRIES = 20
MAX_FRAMES = 100
RECORDED_WITHIN_S = 1.0
# The C library reserves the first few real-time signals, and other programs use signals from either end of the range.
_SIGNALS = range(signal.SIGRTMIN + 10, signal.SIGRTMAX - 4)
_RECORDER = "torch._C._distributed_c10d"

_offered: dict[int, EvidenceOffer] = {}


def offer() -> EvidenceOffer:
    """Install, once, a signal handler that writes this process's stacks to a file. Return the signal and the file."""
    pid = os.getpid()
    if pid not in _offered:
        _offered.clear()  # a forked child has inherited its parent's offer
        _offered[pid] = _register()
    return _offered[pid]


def _register() -> EvidenceOffer:
    try:
        number = _free_signal(_SIGNALS)
        descriptor = os.memfd_create(STACKS_FILE)
        # The reader truncates the file, and O_APPEND makes the next write start at its new end.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(number, file=descriptor, all_threads=True)
    except (OSError, AttributeError, ValueError, RuntimeError) as e:
        log.warning("stacks of this process are only available while it runs Python: %s", e)
        return EvidenceOffer()
    return EvidenceOffer(number, descriptor)


def _free_signal(candidates: Iterable[int]) -> int:
    """Return the first of the `candidates` that is neither handled nor ignored."""
    status = Path("/proc/self/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.MULTILINE)]
    taken = masks[0] | masks[1]
    for number in candidates:
        if not taken >> (number - 1) & 1:
            return number
    raise ValueError("every real-time signal has a handler already")


# -- evidence on request


class SelfReporter:
    """Collects evidence about this process on separate threads, because torch may hang while it describes a hang."""

    def __init__(self) -> None:
        self._reading: threading.Thread | None = None
        self._read = "", ""

    def send_evidence(self, number: int, send: Callable[[SelfReport], None]) -> None:
        """On another thread, collect evidence for request `number` within about RECORDED_WITHIN_S, and `send` it."""
        threading.Thread(target=lambda: send(self._collect(number)), name="lighthouse evidence", daemon=True).start()

    def _collect(self, number: int) -> SelfReport:
        stacks = own_stacks()
        if self._reading is None or not self._reading.is_alive():  # an earlier read may still hang
            self._reading = threading.Thread(target=self._read_recorder, name="lighthouse recorder", daemon=True)
            self._reading.start()
        self._reading.join(RECORDED_WITHIN_S)
        if self._reading.is_alive():
            text, why = "", f"Flight Recorder: no answer from torch within {RECORDED_WITHIN_S:g} s"
        else:
            text, why = self._read
        return SelfReport(number, stacks, text, (why,) if why else ())

    def _read_recorder(self) -> None:
        try:
            text = flight_recorder()
            self._read = text, "" if text else "Flight Recorder: this process has recorded no collective"
        except Exception as e:  # whatever this version of torch raises
            log.exception("cannot read the Flight Recorder")
            self._read = "", f"Flight Recorder: {e!r}"


def own_stacks() -> str:
    """Return the Python stacks of all threads except this one, the main thread last.

    The format is faulthandler's, with the names of threads added.
    """
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


def flight_recorder() -> str:
    """Return torch's record of the newest collectives as JSON, oldest first, or an empty string if there is none."""
    entries = [entry for dump in read_recorders(with_entries=True) for entry in dump.get("entries") or ()]
    return shortened(sorted(entries, key=lambda entry: entry.get("time_created_ns", 0)), time.time())


def read_recorders(*, with_entries: bool) -> list[dict[str, Any]]:
    """Return the dumps of torch's Flight Recorders, parsed.

    Newer versions of torch have one recorder for all backends. Older versions have a recorder for NCCL only.
    """
    module: ModuleType | None = sys.modules.get(_RECORDER)
    dumps = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [json.loads(text) for text in dict.fromkeys(dump(with_entries) for dump in dumps if dump is not None)]


def shortened(entries: Iterable[dict[str, Any]], now_unix_s: float) -> str:
    """Return the useful fields of the newest entries as JSON, at most MAX_FLIGHT_RECORDER_BYTES long."""
    shown = [_shown(entry, now_unix_s) for entry in list(entries)[-NEWEST_ENTRIES:]]
    while len(json.dumps(shown)) > MAX_FLIGHT_RECORDER_BYTES:
        del shown[0]
    return json.dumps(shown) if shown else ""


def _shown(entry: dict[str, Any], now_unix_s: float) -> dict[str, Any]:
    """Return the useful fields of an entry.

    With gloo, `state` stays "scheduled". `retired` is True once the collective has completed.
    """
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


STILL_S = 2.0
_SAME_AT_ALL_RANKS = ("all_reduce", "reduce", "broadcast")

Counts = Mapping[str, int]
Number = tuple[int, int]
"""Identifies a process group: the index of its recorder, and the group's id in that recorder."""
Words = tuple[str, str, tuple[str, ...]]
"""Operation, shape, and the earlier operations of the group that are still running."""


class ScriptGroups:
    """Counts the collectives of the script's process groups. Use it from one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entered: dict[str, int] = {}  # the group with the latest progress is last
        self._recorder = _Recorder()
        self._was_inside: frozenset[str] = frozenset()
        self.moved_at = clock()

    @property
    def total(self) -> int:
        return sum(self._entered.values())

    def read_calls(self) -> tuple[GroupCalls, ...]:
        """Return the collectives of each process group. The group that progressed most recently is first."""
        now, counts = self._clock(), _counts()
        inside = self._recorder.inside(counts)
        if counts != self._entered or self._was_inside - inside.keys():
            self.moved_at = now
            moved = [group for group, count in counts.items() if count != self._entered.get(group)]
            order = [*(group for group in self._entered if group in counts and group not in moved), *moved]
            self._entered = {group: counts[group] for group in order}
        elif counts and now - self.moved_at >= STILL_S:
            self._recorder.note_counts(counts)
        self._was_inside = frozenset(inside)
        newest = list(reversed(self._entered.items()))[:MAX_GROUPS]
        return tuple(
            GroupCalls(group, count, True, *inside[group]) if group in inside else GroupCalls(group, count)
            for group, count in newest
        )


def _counts() -> dict[str, int]:
    """Return the number of collectives of each process group. A group has the same name on all its ranks."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    counts: dict[str, int] = {}
    for group, name in list(world.pg_names.items()) if world is not None else ():
        with suppress(RuntimeError):  # some backends do not count
            if backends := {group._get_backend(device) for device in group._device_types}:
                counts[name[:MAX_NAME_CHARS]] = sum(each._get_sequence_number_for_group() for each in backends)
    return counts


class _Recorder:
    """Finds the running collectives, on a separate thread. A result is valid until the counts of collectives change."""

    def __init__(self) -> None:
        self._reader: threading.Thread | None = None
        # Counts, and the running collectives at the time of these counts.
        self._known: tuple[Counts, dict[Number, list[dict[str, Any]]]] = {}, {}
        self._going_on: tuple[Counts, dict[str, Words]] = {}, {}

    def inside(self, counts: Counts) -> dict[str, Words]:
        """Return the running collectives by group, as last read. Return {} if the counts have changed since then."""
        then, found = self._going_on
        return found if then == counts else {}

    def note_counts(self, counts: Counts) -> None:
        if self._reader is None or not self._reader.is_alive():
            name = "lighthouse recorder"
            self._reader = threading.Thread(target=self._read_running, args=(counts,), name=name, daemon=True)
            self._reader.start()

    def _read_running(self, counts: Counts) -> None:
        try:
            unfinished = {
                (place, int(number))
                for place, dump in enumerate(read_recorders(with_entries=False))
                for number, status in dump.get("pg_status", {}).items()
                if int(status["last_enqueued_collective"]) > int(status["last_completed_collective"])
            }
            if unfinished and self._known[0] != counts:
                self._known = counts, newest_going_on(read_recorders(with_entries=True))
            going_on = [entries for number, entries in self._known[1].items() if number in unfinished]
            described = {str(entries[-1]["process_group"][0]): _describe_running(entries) for entries in going_on}
            self._going_on = counts, described
        except Exception:  # whatever this version of torch raises
            log.debug("cannot read the Flight Recorder", exc_info=True)


def newest_going_on(dumps: list[dict[str, Any]]) -> dict[Number, list[dict[str, Any]]]:
    """Return, for each group with running collectives, the latest of them.

    Each list ends with the group's newest collective, even if that one has completed.
    """
    found: dict[Number, list[dict[str, Any]]] = {}
    for place, dump in enumerate(dumps):
        for entry in dump.get("entries") or ():
            if not entry["is_p2p"]:
                found.setdefault((place, entry["pg_id"]), []).append(entry)
    return {
        number: [*filter(_is_unfinished, entries[:-1]), entries[-1]][-1 - MAX_BEFORE :]
        for number, entries in found.items()
        if any(map(_is_unfinished, entries))
    }


def _is_unfinished(entry: Mapping[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def _describe_running(entries: Sequence[Mapping[str, Any]]) -> Words:
    """Return the operation and shape of the last of a group's `entries`, and the operations of the others.

    The shape is empty if ranks may call this operation with different shapes.
    """
    *before, operation = (
        str(entry["profiling_name"]).rpartition(":")[2].strip("_")[:MAX_NAME_CHARS] for entry in entries
    )
    sizes = entries[-1]["input_sizes"] if operation in _SAME_AT_ALL_RANKS else ()
    shape = ",".join("x".join(map(str, size)) for size in sizes[:1])
    return operation, shape[:MAX_LABEL_CHARS], tuple(before)
