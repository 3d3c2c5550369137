"""How much more memory this process may take: what its host and its control groups (containers, Slurm) leave."""

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Page cache that can be dropped counts as free."""
    return min([_of_host(), *_of_cgroups()])


def _of_host() -> int:
    return _fields(_MEMINFO)["MemAvailable:"] * 1024


def _of_cgroups() -> Iterator[int]:
    """Of each control group with a limit that this process is in, under cgroup v2."""
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
    """None where there is no such file, or no limit ("max")."""
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
