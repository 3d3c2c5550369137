"""Measure the lighthouse's cost of a quorum round: N replica groups request, a quorum of all N forms, N replies go out.

Our lighthouse and torchft's released server take turns under the same load generator (crowd.py), over torchft's wire.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from benchmarks.support.children import Children
from benchmarks.support.daemons import OURS, TORCHFT, start_lighthouse
from benchmarks.support.figures import (
    Bar,
    Measured,
    benchmark,
    of_torchft,
    ratios,
    spread,
    table_of,
    take_turns,
)
from benchmarks.support.torchft_native import released_version

SETTLE_S = 0.1
CALLS_PER_BLOCK = 2000
BARS = {10: 1.5, 100: 1.3, 300: 0.8, 1000: 0.4}
NAMES = {OURS: "ours", TORCHFT: "torchft 0.2"}


class Arena:
    """A product at one size: server and crowd. A block is some rounds."""

    def __init__(self, children: Children, product: str, size: int, rounds: int) -> None:
        self._rounds = rounds
        server = start_lighthouse(children, product, size)
        self._server = server.child
        crowd = ["-m", "benchmarks.support.crowd", server.address, str(size)]
        self._crowd = children.start(f"the crowd of {NAMES[product]}", *crowd)
        self._crowd.read_line()

    def measure(self) -> dict[str, float]:
        """Return the cost per round, with the server's work in the SETTLE_S after the last reply, and the memory."""
        rounds = self._rounds
        began_at = self._server.cpu_s()
        told = self._crowd.ask(rounds=rounds)
        time.sleep(SETTLE_S)
        return {
            "wall_s": sum(told["wall_s"]) / rounds,
            "cpu_s": (self._server.cpu_s() - began_at) / rounds,
            "generator_cpu_s": told["cpu_s"] / rounds,
            "memory_mb": self._server.memory_mb(),
            "peak_memory_mb": self._server.memory_mb("VmHWM"),
        }


def run_size(size: int, blocks: int, calls: int) -> dict[str, Any]:
    """Measure `blocks` blocks of about `calls` calls per contender, in turn. The first turn does not count."""
    rounds = max(2, calls // size)
    products = [OURS, TORCHFT] if released_version() else [OURS]
    with Children() as children:
        arenas = {product: Arena(children, product, size, rounds) for product in products}
        found = take_turns({product: arena.measure for product, arena in arenas.items()}, blocks)
    theirs = found.get(TORCHFT, ())
    servers = [_report(product, measured, theirs) for product, measured in found.items()]
    return {"replica_groups": size, "rounds_per_block": rounds, "servers": servers}


def _report(
    product: str, blocks: Sequence[Mapping[str, float]], torchfts: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    values = {name: [block[name] for block in blocks] for name in blocks[0]}
    return {
        "product": product,
        **{name: spread(values[name]) for name in ("wall_s", "cpu_s", "generator_cpu_s")},
        "cpu_ratio": ratios(values["cpu_s"], [block["cpu_s"] for block in torchfts]) if torchfts else None,
        **{name: values[name][-1] for name in ("memory_mb", "peak_memory_mb")},
        "blocks": blocks,
    }


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "groups, server": lambda row: f"{row['replica_groups']}, {NAMES[row['product']]}",
    "wall ms": lambda row: row["wall_s"].text(1, 1e3),
    "server CPU ms": lambda row: row["cpu_s"].text(1, 1e3),
    "CPU, of torchft's": lambda row: of_torchft(row["cpu_ratio"], is_torchft=row["product"] == TORCHFT),
    "memory MB": lambda row: f"{row['memory_mb']:.0f}",
    "peak MB": lambda row: f"{row['peak_memory_mb']:.0f}",
    "load CPU ms": lambda row: f"{row['generator_cpu_s'].median * 1e3:.1f}",
}


def bars(sizes: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return the bars: the server's CPU time relative to torchft's."""
    ratio = {size["replica_groups"]: size["servers"][0]["cpu_ratio"] for size in sizes}
    return [Bar(f"{n} groups: CPU, of torchft's", ratio[n].median, limit) for n, limit in BARS.items() if ratio.get(n)]


@benchmark("Seconds instead of minutes: one small size, two blocks.", beside_torchft=True)
@click.option("--sizes", default="10,100,300,1000", show_default=True, help="Numbers of replica groups.")
@click.option("--blocks", type=click.IntRange(1), default=9, show_default=True, help="Measured blocks each.")
def main(sizes: str, blocks: int, quick: bool) -> Measured:
    """Measure the cost of a quorum round for our lighthouse and for torchft's."""
    calls = CALLS_PER_BLOCK
    if quick:
        sizes, blocks, calls = "20", 2, 200
    results = [run_size(int(size), blocks, calls) for size in sizes.split(",")]
    rows = [size | row for size in results for row in size["servers"]]
    return table_of(COLUMNS, rows), bars(results), {"blocks": blocks, "sizes": results}


if __name__ == "__main__":
    main()
