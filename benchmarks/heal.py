"""What it takes to heal: seconds and peak memory on both sides, per GiB of state, over loopback.

Ours with a snapshot and without ("hold"), and torchft's HTTP transport, in turn in one run. A source and a target are
processes of their own; the peak is the kernel's (VmHWM), the extra is what lies above their memory before.

With `--sources` instead: the seconds from several sources at once, each in a network namespace behind a link of its
own, and what it costs where one of them is killed half way.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Children
from benchmarks.support.figures import json_option, show_machine, spread, table, write_json
from benchmarks.support.network import SecondHost
from benchmarks.support.torchft_native import released_version

GIB = 2**30
NAMES = {"torchft": "torchft 0.2", "snapshot": "ours, snapshot", "hold": "ours, hold"}


@dataclass(frozen=True, slots=True)
class Heal:
    """`stall_s`: how long the source copies; `cpu_s`: of both sides."""

    seconds: float
    stall_s: float
    cpu_s: float
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

    def heal(self, value: float) -> Heal:
        source, target = self._sides
        source.ask(order="mark", value=value)
        target.ask(order="mark", value=-value)
        served = source.ask(order="serve")
        healed = target.ask(order="heal", address=served["address"], value=value)
        cpu_s = source.ask(order="release") + healed["cpu_s"]
        source_bytes, target_bytes = (side.ask(order="extra_bytes") for side in self._sides)
        seconds = served["serve_s"] + healed["fetch_s"] + healed["install_s"]
        return Heal(seconds, served["serve_s"], cpu_s, source_bytes, target_bytes)


def measure(kind: str, size_bytes: int, repeats: int) -> list[Heal]:
    """After one that is not counted. The pair is gone afterwards: four of them at once may not fit."""
    with Children() as children:
        pair = Pair(children, kind, size_bytes)
        return [pair.heal(float(number + 1)) for number in range(repeats + 1)][1:]


def report(kind: str, size_bytes: int, heals: Sequence[Heal]) -> dict[str, Any]:
    gib = size_bytes / GIB
    return {
        "kind": kind,
        "gib": gib,
        "seconds_per_gib": spread([heal.seconds / gib for heal in heals]),
        "cpu_s_per_gib": spread([heal.cpu_s / gib for heal in heals]),
        "source_stall_s_per_gib": spread([heal.stall_s / gib for heal in heals]),
        "source_extra": spread([heal.source_extra_bytes / size_bytes for heal in heals]),
        "source_extra_mib": spread([heal.source_extra_bytes / 2**20 for heal in heals]),
        "target_extra": spread([heal.target_extra_bytes / size_bytes for heal in heals]),
    }


def render(results: Sequence[Mapping[str, Any]]) -> str:
    memory = ["source extra MiB", "of the state", "target extra, of the state"]
    header = ["state, transport", "s per GiB", "CPU s per GiB", "copying, s per GiB", *memory]
    return table(header, [_cells(row) for row in results])


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['gib']:g} GiB, {NAMES[row['kind']]}",
        row["seconds_per_gib"].text(),
        row["cpu_s_per_gib"].text(),
        row["source_stall_s_per_gib"].text(),
        row["source_extra_mib"].text(0),
        f"{row['source_extra'].high:.3f} x",
        f"{row['target_extra'].high:.3f} x",
    ]


@dataclass(frozen=True, slots=True)
class FromSeveral:
    """`killed_s`: where one of the sources is killed after half of `seconds`; `killed_at_best_s`: what the links of the
    others allow then. 0 with one source."""

    sources: int
    seconds: tuple[float, ...]
    killed_s: float = 0.0
    killed_at_best_s: float = 0.0

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def measure_sources(count: int, size_bytes: int, link_mb_s: float, repeats: int) -> FromSeveral:
    """The first heal is not counted."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(SecondHost(number, link_mb_s)) for number in range(count)]
        children = stack.enter_context(Children())
        arguments = ["-m", "benchmarks.support.healing", "hold", str(size_bytes)]
        sources = [children.start(host.address, *arguments, host.address, within=host.within) for host in hosts]
        target = children.start("target", *arguments)
        for child in (*sources, target):
            child.read_line()

        def begin(value: float) -> None:
            for child in sources:
                child.ask(order="mark", value=value)
            target.ask(order="mark", value=-value)
            addresses = [child.ask(order="serve")["address"] for child in sources]
            target.send(order="heal", address=" ".join(addresses), value=value)

        def heal(value: float) -> float:
            begin(value)
            seconds = target.answer()["fetch_s"]
            for child in sources:
                child.ask(order="release")
            return seconds

        seconds = tuple([heal(float(number + 1)) for number in range(repeats + 1)][1:])
        whole = FromSeveral(count, seconds)
        if count == 1:
            return whole
        begin(-1.0)
        time.sleep(whole.median_s / 2)
        sources[0].signal(signal.SIGKILL)  # the one that the target was assigned
        at_best_s = whole.median_s / 2 * (1 + count / (count - 1))
        return FromSeveral(count, seconds, target.answer()["fetch_s"], at_best_s)


def render_sources(results: Sequence[FromSeveral]) -> str:
    header = ["sources", "seconds", "times as fast", "one killed half way, s", "at best, s"]
    rows = [
        [
            str(row.sources),
            spread(row.seconds).text(),
            f"{results[0].median_s / row.median_s:.2f}",
            f"{row.killed_s:.2f}" if row.killed_s else "",
            f"{row.killed_at_best_s:.2f}" if row.killed_s else "",
        ]
        for row in results
    ]
    return table(header, rows)


def bars_of_sources(results: Sequence[FromSeveral]) -> list[Bar]:
    one, *several = results
    found: list[Bar] = []
    for row in several:
        share = one.sources / row.sources / 0.9
        found.append(
            Bar(f"from {row.sources} at once, of the time from {one.sources}", row.median_s / one.median_s, share)
        )
        found.append(
            Bar(f"one of {row.sources} killed, of what the links allow", row.killed_s / row.killed_at_best_s, 1.2)
        )
    return found


@click.command()
@click.option("--gib", "sizes", type=float, multiple=True, default=(1, 4), show_default=True, help="State to heal.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measured heals each.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: one heal of 1/4 GiB.")
@click.option(
    "--sources", "counts", type=click.IntRange(1, 5), multiple=True, help="Heal from so many at once; root's."
)
@click.option("--link", type=float, default=100.0, show_default=True, help="MB/s of each source, with --sources.")
@check_option
@json_option
def main(
    sizes: Sequence[float],
    repeats: int,
    quick: bool,
    counts: Sequence[int],
    link: float,
    check: bool,
    path: Path | None,
) -> None:
    """Seconds and memory per GiB healed, beside torchft's HTTP transport."""
    if quick:
        sizes, repeats = (0.25,), 1
    if counts:
        return measure_all_sources(counts, int(sizes[0] * GIB), link, repeats, check=check, path=path)
    found = show_machine(beside_torchft=True)
    kinds = ["torchft", "snapshot", "hold"] if released_version() else ["snapshot", "hold"]
    results = [report(kind, int(gib * GIB), measure(kind, int(gib * GIB), repeats)) for gib in sizes for kind in kinds]
    click.echo(render(results))
    write_json(path, {"benchmark": "heal", "machine": found, "repeats": repeats, "results": results})
    return None


def measure_all_sources(
    counts: Sequence[int], size_bytes: int, link: float, repeats: int, *, check: bool, path: Path | None
) -> None:
    found = show_machine()
    results = [measure_sources(count, size_bytes, link, repeats) for count in counts]
    click.echo(render_sources(results))
    report = {"benchmark": "heal", "machine": found, "gib": size_bytes / GIB, "link_mb_s": link, "repeats": repeats}
    write_json(path, report | {"results": [asdict(row) for row in results]})
    conclude(bars_of_sources(results), is_checked=check)


if __name__ == "__main__":
    main()
