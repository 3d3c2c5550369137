"""Measure heals from several sources at once, each behind a link of limited bandwidth.

Each source is a process in a separate network namespace, behind a link that limits its sending rate. With several
sources, one is killed in the middle of an additional heal. The benchmark needs root.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import getpid
from statistics import median
from types import TracebackType
from typing import Self

import click

from benchmarks.support.children import Children
from benchmarks.support.figures import Bar, Measured, benchmark, spread, table_of

GIB = 2**30
SOURCES = (1, 3)


class SecondHost:
    """A numbered network namespace, which can send up to `mb_per_s` times 10^6 bytes per second.

    Requires the permission to administer the network, which `is_possible` checks.
    """

    def __init__(self, number: int = 0, mb_per_s: float = 100.0) -> None:
        self._name = f"lighthouse{getpid()}-{number}"
        self._ours, self._theirs = f"lh{getpid()}a{number}", f"lh{getpid()}b{number}"
        network = f"198.18.{77 + number}"  # RFC 2544 reserves this range for benchmarks
        self._our_address, self.address = f"{network}.1", f"{network}.2"
        self._limit = ("rate", f"{mb_per_s * 8:g}mbit", "burst", "256kb", "latency", "50ms")

    @property
    def within(self) -> tuple[str, ...]:
        """Command prefix that runs another command in the namespace."""
        return ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Self:
        there = ("ip", "-n", self._name)
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", self._ours, "type", "veth", "peer", "name", self._theirs, "netns", self._name)
            _run("ip", "addr", "add", f"{self._our_address}/30", "dev", self._ours)
            _run("ip", "link", "set", self._ours, "up")
            _run(*there, "addr", "add", f"{self.address}/30", "dev", self._theirs)
            _run(*there, "link", "set", "lo", "up")
            _run(*there, "link", "set", self._theirs, "up")
            _run("tc", "-n", self._name, "qdisc", "add", "dev", self._theirs, "root", "tbf", *self._limit)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._tear_down()

    def _tear_down(self) -> None:
        _run("ip", "link", "del", self._ours, check=False)
        _run("ip", "netns", "del", self._name, check=False)


def is_possible() -> bool:
    try:
        with SecondHost():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


@dataclass(frozen=True, slots=True)
class Healed:
    """Times of a heal.

    `killed_s` is the time if one source is killed after half of `seconds`, and `killed_at_best_s` the minimum that the
    links of the others allow. Both are 0 with one source.
    """

    sources: int
    seconds: tuple[float, ...]
    killed_s: float = 0.0
    killed_at_best_s: float = 0.0

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def measure(count: int, size_bytes: int, link_mb_s: float, repeats: int) -> Healed:
    """Measure heals from `count` sources. The first heal does not count."""
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
        if count == 1:
            return Healed(count, seconds)
        begin(-1.0)
        half_s = median(seconds) / 2
        time.sleep(half_s)
        sources[0].signal(signal.SIGKILL)  # the assigned source
        return Healed(count, seconds, target.answer()["fetch_s"], half_s * (1 + count / (count - 1)))


def render(results: Sequence[Healed]) -> str:
    columns: Mapping[str, Callable[[Healed], str]] = {
        "sources": lambda row: str(row.sources),
        "seconds": lambda row: spread(row.seconds).text(),
        "times as fast": lambda row: f"{results[0].median_s / row.median_s:.2f}",
        "one killed half way, s": lambda row: f"{row.killed_s:.2f}" if row.killed_s else "",
        "at best, s": lambda row: f"{row.killed_at_best_s:.2f}" if row.killed_s else "",
    }
    return table_of(columns, results)


def bars(results: Sequence[Healed]) -> list[Bar]:
    one, several = results
    what, limit = f"from {several.sources} at once, of the time from one", 1 / several.sources / 0.9
    killed = several.killed_s / several.killed_at_best_s
    return [Bar(what, several.median_s / one.median_s, limit), Bar("one killed, of what the links allow", killed, 1.2)]


@benchmark("Seconds instead of minutes: 1/16 GiB.")
@click.option("--gib", type=float, default=1.0, show_default=True, help="State to heal.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measured heals each.")
@click.option("--link", type=float, default=100.0, show_default=True, help="MB/s that each sends.")
def main(gib: float, repeats: int, link: float, quick: bool) -> Measured:
    """Measure heals over limited links, from one source and from three."""
    if quick:
        gib, link, repeats = 1 / 16, 25.0, 1
    results = [measure(count, int(gib * GIB), link, repeats) for count in SOURCES]
    return render(results), bars(results), {"gib": gib, "link_mb_s": link, "results": results}


if __name__ == "__main__":
    main()
