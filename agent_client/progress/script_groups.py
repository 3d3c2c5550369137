"""How far this rank has come in the process groups that its script has made, with the collectives of DDP and FSDP.

No collective costs anything for that: torch counts them itself, in C++, whoever asks for them, and the counts are read
when a sample is taken. Which one goes on is in the Flight Recorder. That is read only where nothing has moved for a
while, since all of its entries take some 40 ms, and on a thread of its own, since torch may hang while it reports a
collective that does.
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


# -- self report --------------------------------------------------------------
#
# What this process is doing, for those that ask its manager: its Python stacks, and torch's newest collectives.
#
# It says so itself as long as it runs Python. While C code holds the interpreter lock it cannot: for that,
# faulthandler writes the stacks when a real-time signal comes, which needs no lock. They go to a file without a name;
# the manager sends the signal and reads the file. It does so only where nothing was said: faulthandler walks the
# stacks of other threads as they are, and would crash at times if these ran Python meanwhile (tried: after some
# hundred signals).
#
# A forked child has the handler and the file, too, which does no harm: the signal is never sent to it. A script's own
# faulthandler.enable() stays as it is.

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


STILL_S = 2.0
_SAME_AT_ALL_RANKS = ("all_reduce", "reduce", "broadcast")

Counts = Mapping[str, int]
Number = tuple[int, int]
"""Of a process group: the place of its recorder, and how that numbers it."""
Words = tuple[str, str, tuple[str, ...]]
"""Of a collective that goes on: operation, shape, and the operations before it that go on, too."""


class ScriptGroups:
    """For one thread. `moved_at`: when the rank was last seen to have entered or left a collective."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entered: dict[str, int] = {}  # the group that moved last is the last
        self._recorder = _Recorder()
        self._was_inside: frozenset[str] = frozenset()
        self.moved_at = clock()

    @property
    def total(self) -> int:
        """How many collectives it has entered in the groups that there are."""
        return sum(self._entered.values())

    def read(self) -> tuple[GroupCalls, ...]:
        """The groups that moved last first."""
        now, counts = self._clock(), _counts()
        inside = self._recorder.inside(counts)
        if counts != self._entered or self._was_inside - inside.keys():
            self.moved_at = now
            moved = [group for group, count in counts.items() if count != self._entered.get(group)]
            order = [*(group for group in self._entered if group in counts and group not in moved), *moved]
            self._entered = {group: counts[group] for group in order}
        elif counts and now - self.moved_at >= STILL_S:
            self._recorder.look(counts)
        self._was_inside = frozenset(inside)
        newest = list(reversed(self._entered.items()))[:MAX_GROUPS]
        return tuple(
            GroupCalls(group, count, True, *inside[group]) if group in inside else GroupCalls(group, count)
            for group, count in newest
        )


def _counts() -> dict[str, int]:
    """By the name of the group, which its ranks share. torch is not imported for that."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    counts: dict[str, int] = {}
    for group, name in list(world.pg_names.items()) if world is not None else ():
        with suppress(RuntimeError):  # a backend that does not count
            if backends := {group._get_backend(device) for device in group._device_types}:
                counts[name[:MAX_NAME_CHARS]] = sum(each._get_sequence_number_for_group() for each in backends)
    return counts


class _Recorder:
    """What goes on, and what it is: as of the counts with which it was looked up."""

    def __init__(self) -> None:
        self._looking: threading.Thread | None = None
        self._known: tuple[Counts, dict[Number, list[dict[str, Any]]]] = {}, {}  # entries that went on
        self._going_on: tuple[Counts, dict[str, Words]] = {}, {}

    def inside(self, counts: Counts) -> dict[str, Words]:
        """By group."""
        then, found = self._going_on
        return found if then == counts else {}

    def look(self, counts: Counts) -> None:
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, args=(counts,), name="lighthouse recorder", daemon=True)
            self._looking.start()

    def _look(self, counts: Counts) -> None:
        try:
            unfinished = {
                (place, int(number))
                for place, dump in enumerate(read_recorders(with_entries=False))
                for number, status in dump.get("pg_status", {}).items()
                if _goes_on(status)
            }
            if unfinished and self._known[0] != counts:
                self._known = counts, newest_going_on(read_recorders(with_entries=True))
            going_on = [entries for number, entries in self._known[1].items() if number in unfinished]
            self._going_on = counts, {str(entries[-1]["process_group"][0]): _words(entries) for entries in going_on}
        except Exception:  # whatever this version of torch raises
            log.debug("cannot read the Flight Recorder", exc_info=True)


def _goes_on(status: Mapping[str, str]) -> bool:
    return int(status["last_enqueued_collective"]) > int(status["last_completed_collective"])


def newest_going_on(dumps: list[dict[str, Any]]) -> dict[Number, list[dict[str, Any]]]:
    """Of each group in which a collective goes on: the newest one, after those before it that go on, too."""
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


def _words(entries: Sequence[Mapping[str, Any]]) -> Words:
    """The shape only of what has the same one at all ranks."""
    *before, operation = (
        str(entry["profiling_name"]).rpartition(":")[2].strip("_")[:MAX_NAME_CHARS] for entry in entries
    )
    sizes = entries[-1]["input_sizes"] if operation in _SAME_AT_ALL_RANKS else ()
    shape = ",".join("x".join(map(str, size)) for size in sizes[:1])
    return operation, shape[:MAX_LABEL_CHARS], tuple(before)
