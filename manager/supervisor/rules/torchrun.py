"""torchrun as the command of a supervisor: what can be told from its words. No I/O.

torchrun is one process to the supervisor; the ranks are torchrun's, and only one of the two may restart them.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid")


@dataclass(frozen=True, slots=True)
class Torchrun:
    """`world_size`: None where it is not told by numbers."""

    max_restarts: str
    world_size: int | None


def read_torchrun(command: Sequence[str]) -> Torchrun | None:
    """None for another command."""
    is_torchrun = command[0].rpartition("/")[2] == "torchrun"
    is_module = any(a == "-m" and b in _MODULES for a, b in itertools.pairwise(command))
    if not (is_torchrun or is_module):
        return None
    options = _options(command)
    nproc, nnodes = options.get("nproc-per-node", "1"), options.get("nnodes", "1")
    world_size = int(nproc) * int(nnodes) if nproc.isdigit() and nnodes.isdigit() else None
    return Torchrun(options.get("max-restarts", "0"), world_size)


def exit_behind(status: int, words: Sequence[str]) -> int:
    """torchrun ends with 1 whatever its rank ended with, and says the rest in words: the rank's own status."""
    found = [_EXIT.search(word) for word in words]
    return next((int(match[1]) for match in found if match is not None), status) if status == 1 else status


def _options(command: Sequence[str]) -> dict[str, str]:
    """Of torchrun and of the script; the first one counts."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            found.setdefault(name[2:].replace("_", "-"), value if has_value else following)
    return found
