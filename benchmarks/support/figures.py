"""Results of a benchmark: options, statistics, bars, the description of the machine, and the output."""

import functools
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.support.children import ROOT
from benchmarks.support.torchft_native import MISSING, released_version

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for a measured value."""

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit

    @property
    def cells(self) -> list[str]:
        limit, met = f"{self.limit:g} {self.unit}", "yes" if self.is_met else "**no**"
        return [self.what, f"{self.value:.4g} {self.unit}", limit, met]


Measured = tuple[str, Sequence[Bar], Mapping[str, Any]]
"""Results of a benchmark: the text to print, the bars, and the content of the JSON report."""


def benchmark(quick: str, *, beside_torchft: bool = False) -> Callable[[Callable[..., Measured]], click.Command]:
    """Make a command of a function that takes `quick`. `quick` is the help text of --quick.

    With `beside_torchft`, the command warns if torchft is not installed.
    """

    def decorate(measure: Callable[..., Measured]) -> click.Command:
        @click.command()
        @click.option("--quick", is_flag=True, help=quick)
        @click.option("--check", is_flag=True, help="End with status 1 if a bar is missed.")
        @click.option(
            "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there too."
        )
        @functools.wraps(measure)
        def main(*, check: bool, path: Path | None, **options: Any) -> None:
            machine = show_machine(beside_torchft=beside_torchft)
            text, bars, found = measure(**options)
            report = {"benchmark": Path(inspect.getfile(measure)).stem, "machine": machine, **found}
            finish(text, report, bars, is_checked=check, path=path)

        return main

    return decorate


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        low, high = (f"{value * factor:.{digits}f}" for value in (self.low, self.high))
        return f"{self.median * factor:.{digits}f} ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratios of measurements that were made in turn, pair by pair."""
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)])


def of_torchft(ratio: Spread | None, *, is_torchft: bool) -> str:
    """Return the cell of a ratio to torchft's measurements, which is None without them."""
    return "-" if ratio is None else "1" if is_torchft else ratio.text()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by at least `share` of all values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show_machine(*, beside_torchft: bool = False) -> dict[str, Any]:
    """Print and return the description of the machine. With `beside_torchft`, warn if torchft is not installed."""
    found = _machine()
    click.echo(machine_text(found, f"{found['load_average']:.1f} before the run"))
    if beside_torchft and found["torchft"] is None:
        click.echo(MISSING, err=True)
    return found


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
        "torchft": released_version(),
        "commit": _commit(),
    }


def machine_text(found: Mapping[str, Any], load_average: str) -> str:
    """Return the date, the machine, the versions and the commit as one sentence without a period."""
    return (
        f"{found['date']}, {found['cores']} cores ({found['cpu']}), {found['memory_gb']} GB, Linux {found['kernel']}, "
        f"load average {load_average}, "
        f"Python {found['python']}, grpcio {found['grpcio']}, torchft {found['torchft'] or 'not installed'}, "
        f"commit {found['commit']}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. All columns but the first are aligned to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_row(row, widths) for row in (header, rule, *rows))


def table_of(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> str:
    """Return a table with a line for each row; `columns` has the header and the cell of each column."""
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def take_turns(contenders: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Let the contenders measure a block each, in turn, and return the blocks. The first turn does not count."""
    rounds = [{name: measure() for name, measure in contenders.items()} for _ in range(turns + 1)]
    return {name: [blocks[name] for blocks in rounds[1:]] for name in contenders}


def finish(text: str, report: dict[str, Any], bars: Sequence[Bar], *, is_checked: bool, path: Path | None) -> None:
    """Print `text` and the bars, and write the report. If `is_checked`, exit with status 1 after a missed bar."""
    click.echo(text)
    if path is not None:
        path.write_text(json.dumps(report, indent=2, default=asdict) + "\n")
    if bars:
        click.echo("\n" + table(["bar", "measured", "at most", "met"], [bar.cells for bar in bars]))
    if is_checked and not all(bar.is_met for bar in bars):
        sys.exit(1)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return " | ".join(("| " + cells[0].ljust(widths[0]), *padded[1:])) + " |"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
