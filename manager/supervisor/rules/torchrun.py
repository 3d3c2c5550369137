"""torchrun as the command of a supervisor: what can be told from its words. No I/O.

torchrun is one process to the supervisor; the ranks are torchrun's, and only one of the two may restart them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)\s*\(pid: (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """`world_size`: None where it is not told by numbers. `master_port`: None where the supervisor chooses it, 0 where
    torchrun does, at each start."""

    max_restarts: str
    world_size: int | None
    master_port: int | None = None


class Failure(NamedTuple):
    """Of one of its ranks, as it says."""

    rank: int
    status: int
    pid: int


def read_torchrun(command: Sequence[str], variables: Mapping[str, str]) -> Torchrun | None:
    """None for another command. `variables`: PET_ and the name of an option stand for that option."""
    is_torchrun = command[0].rpartition("/")[2] == "torchrun"
    is_module = any(a == "-m" and b in _MODULES for a, b in itertools.pairwise(command))
    if not (is_torchrun or is_module):
        return None
    given = {name[4:].lower().replace("_", "-"): value for name, value in variables.items() if name[:4] == "PET_"}
    options = given | _options(command)
    nproc, nnodes = options.get("nproc-per-node", "1"), options.get("nnodes", "1")
    world_size = int(nproc) * int(nnodes) if nproc.isdigit() and nnodes.isdigit() else None
    return Torchrun(options.get("max-restarts", "0"), world_size, _master_port(options))


def failure_behind(status: int, words: Sequence[str]) -> Failure | None:
    """torchrun ends with 1 whatever its rank ended with, and says the rest in words; the first failure comes last."""
    found = _FAILURE.findall("\n".join(words)) if status == 1 else []
    return Failure(*map(int, found[-1])) if found else None


def _master_port(options: Mapping[str, str]) -> int | None:
    if "standalone" in options or options.get("rdzv-backend", "static") != "static":
        return 0
    port = options.get("rdzv-endpoint", "").rpartition(":")[2] or options.get("master-port", "")
    return int(port) if port.isdigit() else None


def _options(command: Sequence[str]) -> dict[str, str]:
    """Of torchrun and of the script; the first one counts."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            found.setdefault(name[2:].replace("_", "-"), value if has_value else following)
    return found
