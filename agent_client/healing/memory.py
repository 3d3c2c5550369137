"""Determines how much memory this process can still allocate, given its host and its cgroups (containers, Slurm)."""

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

ROOM_FOR_A_COPY = 2.0
"""A state is copied only if at least this many times its size is free."""


def has_room(size: int) -> bool:
    """Return whether there is memory for a copy of `size` bytes for each rank on this host."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return available_bytes() > ROOM_FOR_A_COPY * ranks_here * size


def available_bytes() -> int:
    """Return how many bytes this process can still allocate. Droppable page cache counts as free."""
    return min([_of_host(), *_of_cgroups()])


def _of_host() -> int:
    return _fields(_MEMINFO)["MemAvailable:"] * 1024


def _of_cgroups() -> Iterator[int]:
    """Yield the free bytes of each cgroup (v2) of this process that has a limit, from the innermost outwards."""
    own = next((line[3:] for line in _OWN_CGROUPS.read_text().splitlines() if line.startswith("0::/")), None)
    if own is None:
        return
    folder = _CGROUPS / own.lstrip("/")
    for group in (folder, *folder.parents):
        limit = _number(group / "memory.max")
        if limit is not None:
            used = _number(group / "memory.current") or 0
            yield max(0, limit - used + _fields(group / "memory.stat").get("inactive_file", 0))
        if group == _CGROUPS:
            return


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file does not exist or contains "max" (no limit)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value, *_ in map(str.split, lines)}
