"""Seconds that a heal takes from several sources at once, over links of so many MB/s.

Each source is a process in a network namespace of its own, behind a link that bounds what it sends. Also what that
costs the sources, which serve the state where it lies and train meanwhile (Steps in support/healing.py), and what it
costs where one of them is killed half way. It takes root.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Children
from benchmarks.support.figures import json_option, show_machine, spread, table, write_json
from benchmarks.support.network import SecondHost

GIB = 2**30
SOURCES = (1, 2, 3)
SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class FromSeveral:
    """`steps`: how long the sources' steps took beside a heal, in the mean, of those without. `killed_s`: where one of
    the sources is killed after half of `seconds`; `killed_at_best_s`: what the links of the others allow then. Both are
    0 with one source."""

    sources: int
    seconds: tuple[float, ...]
    steps: float
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

        def steps() -> list[float]:
            return [step for child in sources for step in child.ask(order="steps")]

        seconds = tuple([heal(float(number + 1)) for number in range(repeats + 1)][1:])
        without, beside = [], []
        for number in range(repeats):
            steps()
            time.sleep(max(SETTLED_S, median(seconds)))
            without += steps()
            heal(-float(number + 2))
            beside += steps()
        whole = FromSeveral(count, seconds, mean(beside) / mean(without))
        if count == 1:
            return whole
        begin(-1.0)
        time.sleep(whole.median_s / 2)
        sources[0].signal(signal.SIGKILL)  # the one that the target was assigned
        at_best_s = whole.median_s / 2 * (1 + count / (count - 1))
        return replace(whole, killed_s=target.answer()["fetch_s"], killed_at_best_s=at_best_s)


def render_sources(results: Sequence[FromSeveral]) -> str:
    header = ["sources", "seconds", "times as fast", "sources' steps", "one killed half way, s", "at best, s"]
    rows = [
        [
            str(row.sources),
            spread(row.seconds).text(),
            f"{results[0].median_s / row.median_s:.2f}",
            f"{row.steps:.3f}",
            f"{row.killed_s:.2f}" if row.killed_s else "",
            f"{row.killed_at_best_s:.2f}" if row.killed_s else "",
        ]
        for row in results
    ]
    return table(header, rows)


def bars_of_sources(results: Sequence[FromSeveral]) -> list[Bar]:
    one, *several = results
    found = [
        Bar(f"sources' steps beside a heal, of those without, {row.sources} at once", row.steps, 1.1) for row in results
    ]
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
@click.option("--gib", "gib", type=float, default=1.0, show_default=True, help="State to heal.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measured heals each.")
@click.option("--link", type=float, default=100.0, show_default=True, help="MB/s that each sends.")
@click.option("--sources", type=click.IntRange(1, 5), multiple=True, help="So many; else 1, 2 and 3.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: two sources, of 1/16 GiB.")
@check_option
@json_option
def main(
    gib: float,
    repeats: int,
    link: float,
    sources: Sequence[int],
    quick: bool,
    check: bool,
    path: Path | None,
) -> None:
    """Seconds of a heal over links, from several sources."""
    found, size_bytes = show_machine(), int(gib * GIB)
    if quick:
        size_bytes, link, repeats, sources = GIB // 16, 25.0, 1, (1, 2)
    from_several = [measure_sources(count, size_bytes, link, repeats) for count in sources or SOURCES]
    click.echo(render_sources(from_several))
    report = {"benchmark": "heal_links", "machine": found, "gib": gib, "link_mb_s": link, "repeats": repeats}
    write_json(path, report | {"sources": [asdict(row) for row in from_several]})
    conclude(bars_of_sources(from_several), is_checked=check)


if __name__ == "__main__":
    main()
