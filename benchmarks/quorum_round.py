"""What one quorum round costs the lighthouse: N replica groups ask, a quorum of all N forms, N answers go out.

Ours and torchft's released server in turn, under one generator (crowd.py), over torchft's wire; the server library
that ours is built on, with a handler that gives all the same answer and does nothing else (bare_lighthouse.py); then
ours over its own wire, and ours with a member that comes back anew in every round, so that the quorum is another one.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import BARE, OURS, TORCHFT, Daemon, start_lighthouse
from benchmarks.support.figures import Spread, json_option, ratios, show_machine, spread, table, write_json
from benchmarks.support.torchft_native import released_version

SETTLE_S = 0.1
CALLS_PER_BLOCK = 2000


@dataclass(frozen=True, slots=True)
class Block:
    """Some rounds in a row; all numbers but the memory are per round."""

    wall_s: float
    cpu_s: float
    generator_cpu_s: float
    memory_mb: float
    peak_memory_mb: float


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    product: str
    wire: str
    changes: bool = False


SAME_WIRE = Contender("ours", OURS, "torchft")
REFERENCE = Contender("torchft 0.2", TORCHFT, "torchft")
FLOOR = Contender("grpc.aio alone", BARE, "torchft")
OWN_WIRE = Contender("ours, lighthouse.v1", OURS, "lighthouse.v1")
CHANGING = Contender("ours, lighthouse.v1, a change each round", OURS, "lighthouse.v1", changes=True)


@dataclass(slots=True)
class Arena:
    """One contender at one size: its server, its crowd, what was measured so far."""

    contender: Contender
    server: Daemon
    crowd: Child
    memory_connected_mb: float
    blocks: list[Block] = field(default_factory=list[Block])

    @classmethod
    def open(cls, children: Children, contender: Contender, size: int) -> "Arena":
        server = start_lighthouse(children, contender.product, size)
        arguments = ["-m", "benchmarks.support.crowd", contender.wire, server.address, str(size)]
        crowd = children.start(f"the crowd of {contender.name}", *arguments)
        crowd.read_line()
        return cls(contender, server, crowd, server.child.memory_mb())

    def measure(self, rounds: int) -> Block:
        """The server's trailing work, SETTLE_S after the last answer, is counted."""
        server = self.server.child
        began_at = server.cpu_s()
        told = self.crowd.ask(rounds=rounds, changes=self.contender.changes)
        time.sleep(SETTLE_S)
        return Block(
            wall_s=sum(told["wall_s"]) / rounds,
            cpu_s=(server.cpu_s() - began_at) / rounds,
            generator_cpu_s=told["cpu_s"] / rounds,
            memory_mb=server.memory_mb(),
            peak_memory_mb=server.memory_mb("VmHWM"),
        )

    def values(self, name: str) -> list[float]:
        return [getattr(block, name) for block in self.blocks]


def contenders() -> list[Contender]:
    return [SAME_WIRE, *([REFERENCE] if released_version() else []), FLOOR, OWN_WIRE, CHANGING]


def run_size(size: int, blocks: int, calls: int) -> dict[str, Any]:
    """All contenders in turn, `blocks` times, after one turn that is not counted; a block has about `calls` calls."""
    rounds = max(2, calls // size)
    with Children() as children:
        arenas = [Arena.open(children, contender, size) for contender in contenders()]
        for turn in range(blocks + 1):
            for arena in arenas:
                block = arena.measure(rounds)
                if turn > 0:
                    arena.blocks.append(block)
    return {"replica_groups": size, "rounds_per_block": rounds, "servers": [_report(arena, arenas) for arena in arenas]}


def _report(arena: Arena, arenas: Sequence[Arena]) -> dict[str, Any]:
    reference = next((other for other in arenas if other.contender is REFERENCE), None)
    names = ("wall_s", "cpu_s", "generator_cpu_s")
    return {
        "server": arena.contender.name,
        **{name: spread(arena.values(name)) for name in names},
        "cpu_ratio": ratios(arena.values("cpu_s"), reference.values("cpu_s")) if reference else None,
        "wall_ratio": ratios(arena.values("wall_s"), reference.values("wall_s")) if reference else None,
        "memory_connected_mb": arena.memory_connected_mb,
        "memory_mb": arena.values("memory_mb")[-1],
        "peak_memory_mb": arena.values("peak_memory_mb")[-1],
        "blocks": arena.blocks,
    }


def render(sizes: Sequence[Mapping[str, Any]]) -> str:
    header = ["groups, server", "wall ms", "server CPU ms", "CPU, of torchft's", "memory MB", "peak MB", "load CPU ms"]
    return table(header, [_cells(size["replica_groups"], row) for size in sizes for row in size["servers"]])


def _cells(size: int, row: Mapping[str, Any]) -> list[str]:
    ratio: Spread | None = row["cpu_ratio"]
    is_reference = row["server"] == REFERENCE.name
    return [
        f"{size}, {row['server']}",
        row["wall_s"].text(1, 1e3),
        row["cpu_s"].text(1, 1e3),
        "1" if is_reference else ratio.text() if ratio else "-",
        f"{row['memory_mb']:.0f}",
        f"{row['peak_memory_mb']:.0f}",
        f"{row['generator_cpu_s'].median * 1e3:.1f}",
    ]


@click.command()
@click.option("--sizes", default="10,100,300,1000", show_default=True, help="Numbers of replica groups.")
@click.option("--blocks", type=click.IntRange(1), default=9, show_default=True, help="Measured blocks each.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: one small size, two blocks.")
@json_option
def main(sizes: str, blocks: int, quick: bool, path: Path | None) -> None:
    """What one quorum round costs the lighthouse, beside torchft's."""
    calls = CALLS_PER_BLOCK
    if quick:
        sizes, blocks, calls = "20", 2, 200
    found = show_machine(beside_torchft=True)
    results = [run_size(int(size), blocks, calls) for size in sizes.split(",")]
    click.echo(render(results))
    write_json(path, {"benchmark": "quorum_round", "machine": found, "blocks": blocks, "sizes": results})


if __name__ == "__main__":
    main()
