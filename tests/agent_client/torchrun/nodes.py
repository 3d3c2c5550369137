"""torchrun, a process for each node, with our entry point as pyproject.toml has it; and the script that it runs.

A worker says where it runs, then at which step it is, until there is a file `finish`. It raises when it finds
`raise-NODE`, where NODE is what its node was named.
"""

import os
import re
import signal
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.agent_client.clusters import descendants
from tests.processes import PATIENCE_S, ROOT, Process, eventually

NODE = "from torch.distributed.run import main; main()"

SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

folder, node = pathlib.Path(sys.argv[1]), os.environ["NODE"]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
print("runs", rank, size, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
ends = torch.zeros(1)
while not ends:
    ends = torch.tensor(float(rank == 0 and (folder / "finish").exists()))
    dist.all_reduce(ends)
    if (folder / f"raise-{node}").exists():
        (folder / f"raise-{node}").unlink()
        raise RuntimeError("boom")
    time.sleep(0.02)
print("has finished", flush=True)
"""


def entry_points(folder: Path) -> str:
    """A folder for PYTHONPATH, in which the project is installed as far as its entry points go."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "installed" / "lighthouse_ft-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lighthouse-ft\nVersion: 0\n")
    lines: list[str] = []
    for name, entries in groups.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(info.parent)


@dataclass(frozen=True)
class Place:
    rank: int
    size: int
    restarts: int


class TorchrunNode(Process):
    """One node of the job `nodes`, which is torchrun's --nnodes. `options`: further ones of torchrun. `lighthouse`
    None: `variables` name it."""

    def __init__(
        self,
        name: str,
        lighthouse: str | None,
        folder: Path,
        nodes: str,
        options: Sequence[str] = (),
        **variables: str,
    ) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.name = name
        self._folder = folder
        backend = ["--rdzv-backend", "lighthouse", "--rdzv-id", "job", "--nnodes", nodes]
        backend += ["--rdzv-endpoint", lighthouse] if lighthouse is not None else []
        env = variables | {
            "NODE": name,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{entry_points(folder)}",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(NODE, [*backend, *options, str(folder / "train.py"), str(folder)], env=env)

    def places(self) -> list[Place]:
        """Where its worker ran, the newest last."""
        return [Place(*map(int, found)) for found in re.findall(r"^runs (\d+) (\d+) (\d+)$", self.log(), re.MULTILINE)]

    @property
    def place(self) -> Place | None:
        return places[-1] if (places := self.places()) else None

    def fail(self) -> None:
        (self._folder / f"raise-{self.name}").touch()

    def die(self) -> None:
        """As a machine does: all its processes at once."""
        self.signal(signal.SIGSTOP)
        below = descendants(self.pid)
        self.kill()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        with suppress(AttributeError):  # it was never launched
            if self.is_alive:
                self.die()
        super().close()


def run_together(nodes: Sequence[TorchrunNode], *, after: dict[str, int] | None = None) -> dict[str, Place]:
    """Once all of them run in one round, each with more rounds behind it than in `after`."""
    before = after or {}

    def look() -> dict[str, Place] | None:
        ended = [node.name for node in nodes if not node.is_alive]
        assert not ended, f"{ended} have ended:\n{logs(nodes)}"
        places = {node.name: node.place for node in nodes if len(node.places()) > before.get(node.name, 0)}
        ranks = sorted(place.rank for place in places.values() if place is not None and place.size == len(nodes))
        return {name: place for name, place in places.items() if place} if ranks == list(range(len(nodes))) else None

    try:
        return eventually(look, within_s=2 * PATIENCE_S) or {}
    except AssertionError as e:
        raise AssertionError(f"{[node.name for node in nodes]} do not run together: {e}\n{logs(nodes)}") from None


def rounds(nodes: Sequence[TorchrunNode]) -> dict[str, int]:
    return {node.name: len(node.places()) for node in nodes}


def logs(nodes: Sequence[TorchrunNode]) -> str:
    return "\n".join(f"--- {node.name}\n{node.log()[-2500:]}" for node in nodes)
