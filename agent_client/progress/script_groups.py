"""How far this rank has come in the process groups that its script has made, with the collectives of DDP and FSDP.

No collective costs anything for that: torch counts them itself, in C++, whoever asks for them, and the counts are read
when a sample is taken. Which one goes on is in the Flight Recorder. That is read only where nothing has moved for a
while, since all of its entries take some 40 ms, and on a thread of its own, since torch may hang while it reports a
collective that does.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agent_client.progress.self_report import read_recorders
from lighthouse_protocol.messages.progress import MAX_BEFORE, MAX_GROUPS, MAX_LABEL_CHARS, MAX_NAME_CHARS, GroupCalls

log = logging.getLogger(__name__)

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
