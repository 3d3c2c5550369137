"""Measure a heal over loopback: seconds, and peak memory on both sides, per GiB of state.

The kinds are ours with a snapshot, ours without one ("hold"), and torchft's HTTP transport. They take turns in one run
if the memory suffices for all of them, else they run one after the other. Source and target are separate processes. The
peak is the kernel's VmHWM, and the extra memory is its excess over the memory before the heal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from agent_client.healing.healing import available_bytes
from benchmarks.support.children import Children
from benchmarks.support.figures import Bar, Measured, benchmark, ratios, spread, table_of, take_turns
from benchmarks.support.torchft_native import released_version

GIB = 2**30
BAR = 1.1
"""Maximum ratio of our time with "hold" to torchft's."""
NAMES = {"torchft": "torchft 0.2", "snapshot": "ours, snapshot", "hold": "ours, hold"}


@dataclass(frozen=True, slots=True)
class Heal:
    """Cost of one heal."""

    seconds: float
    stall_s: float  # time in which the source copies
    cpu_s: float  # both sides together
    source_extra_bytes: int
    target_extra_bytes: int


class Pair:
    """A source and a target of one kind."""

    def __init__(self, children: Children, kind: str, size_bytes: int) -> None:
        self._sides = [
            children.start(f"{kind} {side}", "-m", "benchmarks.support.healing", kind, str(size_bytes))
            for side in ("source", "target")
        ]
        for side in self._sides:
            side.read_line()
        self._heals = 0

    def heal(self) -> Heal:
        self._heals += 1
        value, (source, target) = float(self._heals), self._sides
        source.ask(order="mark", value=value)
        target.ask(order="mark", value=-value)
        served = source.ask(order="serve")
        healed = target.ask(order="heal", address=served["address"], value=value)
        cpu_s = source.ask(order="release") + healed["cpu_s"]
        source_bytes, target_bytes = (side.ask(order="extra_bytes") for side in self._sides)
        seconds = served["serve_s"] + healed["fetch_s"] + healed["install_s"]
        return Heal(seconds, served["serve_s"], cpu_s, source_bytes, target_bytes)


def measure(kinds: Sequence[str], size_bytes: int, repeats: int) -> dict[str, list[Heal]]:
    """Measure heals of each kind in turn."""
    if len(kinds) > 1 and not _fit(len(kinds), size_bytes):
        return {kind: heals for each in kinds for kind, heals in measure([each], size_bytes, repeats).items()}
    with Children() as children:
        pairs = {kind: Pair(children, kind, size_bytes) for kind in kinds}
        return take_turns({kind: pair.heal for kind, pair in pairs.items()}, repeats)


def _fit(pairs: int, size_bytes: int) -> bool:
    """Check the memory for one state in each process, and a second one in two of them."""
    return available_bytes() > 1.2 * (2 * pairs + 2) * size_bytes


def report(kind: str, size_bytes: int, heals: Sequence[Heal], torchfts: Sequence[Heal]) -> dict[str, Any]:
    """Return the report of one kind. `torchfts` are torchft's heals in the same rounds, empty without torchft."""
    gib = size_bytes / GIB
    times = [[heal.seconds for heal in found] for found in (heals, torchfts)]
    return {
        "kind": kind,
        "gib": gib,
        "of_torchft": ratios(*times) if torchfts else None,
        "seconds_per_gib": spread([heal.seconds / gib for heal in heals]),
        "cpu_s_per_gib": spread([heal.cpu_s / gib for heal in heals]),
        "source_stall_s_per_gib": spread([heal.stall_s / gib for heal in heals]),
        "source_extra": spread([heal.source_extra_bytes / size_bytes for heal in heals]),
        "source_extra_mib": spread([heal.source_extra_bytes / 2**20 for heal in heals]),
        "target_extra": spread([heal.target_extra_bytes / size_bytes for heal in heals]),
    }


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "state, transport": lambda row: f"{row['gib']:g} GiB, {NAMES[row['kind']]}",
    "s per GiB": lambda row: row["seconds_per_gib"].text(),
    "of torchft's": lambda row: row["of_torchft"].text() if row["of_torchft"] else "-",
    "CPU s per GiB": lambda row: row["cpu_s_per_gib"].text(),
    "copying, s per GiB": lambda row: row["source_stall_s_per_gib"].text(),
    "source extra MiB": lambda row: row["source_extra_mib"].text(0),
    "of the state": lambda row: f"{row['source_extra'].high:.3f} x",
    "target extra, of the state": lambda row: f"{row['target_extra'].high:.3f} x",
}


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    return [
        Bar(f"{row['gib']:g} GiB, {NAMES['hold']}: of torchft's time", row["of_torchft"].median, BAR)
        for row in results
        if row["kind"] == "hold" and row["of_torchft"]
    ]


@benchmark("Seconds instead of minutes: one heal of 1/4 GiB.", beside_torchft=True)
@click.option("--gib", "sizes", type=float, multiple=True, default=(1, 4), show_default=True, help="State to heal.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measured heals each.")
def main(sizes: Sequence[float], repeats: int, quick: bool) -> Measured:
    """Measure seconds and memory per GiB healed, for us and for torchft's HTTP transport."""
    if quick:
        sizes, repeats = (0.25,), 1
    kinds = ["torchft", "snapshot", "hold"] if released_version() else ["snapshot", "hold"]
    results = [
        report(kind, size_bytes, heals, found.get("torchft", ()))
        for size_bytes in (int(gib * GIB) for gib in sizes)
        for found in [measure(kinds, size_bytes, repeats)]
        for kind, heals in found.items()
    ]
    return table_of(COLUMNS, results), bars(results), {"repeats": repeats, "results": results}


if __name__ == "__main__":
    main()
