"""Run the benchmarks behind the README's claims, and write the results as tables.

README.md shows the first rows and docs/concepts/comparison.md all of them, with date, machine and commit.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.recovery import GIVE_UP_S
from benchmarks.report import error_of
from benchmarks.step_overhead import OWN_CLIENT, REFERENCE, SAME_CLIENT, Setup
from benchmarks.support.children import ROOT
from benchmarks.support.daemons import OURS, TORCHFT
from benchmarks.support.figures import machine_text
from benchmarks.torchrun import C10D, LIGHTHOUSE

Report = Mapping[str, Any]
"""The JSON document of a benchmark."""

OPTIONS: Mapping[str, Sequence[str]] = {
    "quorum_round": ("--sizes", "10,1000"),
    "heal": ("--gib", "1"),
    "keepers": ("--kills", "20", "--blocks", "1"),
}
"""Options of the benchmarks that do not run with their defaults."""

SOURCES: Mapping[str, tuple[str, str]] = {
    "recovery": ("recovery", "torchft"),
    "restart": ("a-restart-inside-the-process", "torchrun"),
    "torchrun": ("a-node-of-torchrun-dies", "c10d"),
    "step_overhead": ("every-step", "torchft"),
    "quorum_round": ("one-quorum-round", "torchft"),
    "heal": ("healing", "torchft"),
    "step_time": ("the-same-on-a-quiet-machine", "torchft"),
    "keepers": ("all-groups-die", "without `--keep-every`"),
    "stragglers": ("a-slow-group", "without `share_by_speed`"),
    "preemption": ("preemption", ""),
    "report": ("the-report", ""),
}
"""For each benchmark, its anchor in benchmarks/README.md, and the alternative that it also measures."""

HEADER = ("Measured", "Lighthouse", "Alternative", "Source", "Command")
IN_README = 3
LEAST_PERCENT = 0.001
BEGIN, END = "<!-- measured -->\n\n", "\n<!-- end of measured -->\n"


@dataclass(frozen=True, slots=True)
class Row:
    """A measured claim. `read` returns the results of Lighthouse and of the alternative; None if not measured."""

    what: str
    benchmark: str
    read: Callable[[Report], tuple[str, str | None]]

    @property
    def section(self) -> str:
        return SOURCES[self.benchmark][0]

    def line(self, reports: Mapping[str, Report], page: str) -> str:
        ours, other = self.read(reports[self.benchmark])
        shown = "not measured" if other is None else f"{SOURCES[self.benchmark][1]}: {other}"
        cells = [self.what, ours, shown, f"[{self.benchmark}]({page}#{self.section})"]
        return f"| {' | '.join(cells)} | `python -m benchmarks.{self.benchmark}` |"


def _loss(fault: str) -> Callable[[Report], tuple[str, str | None]]:
    def read(report: Report) -> tuple[str, str | None]:
        found = {
            row["product"]: statistics.median(run["committed_s"] for run in row["runs"])
            for row in report["results"]
            if row["fault"] == fault
        }
        return _pair(found, OURS, TORCHFT, 0)

    return read


def _calls(setup: Setup) -> Callable[[Report], tuple[str, str | None]]:
    def read(report: Report) -> tuple[str, str | None]:
        found = {row["contender"]: row["calls"]["both_s"]["median_s"] for row in report["contenders"]}
        return _pair(found, setup.name, REFERENCE.name, 2)

    return read


def _round(groups: int) -> Callable[[Report], tuple[str, str | None]]:
    def read(report: Report) -> tuple[str, str | None]:
        [size] = [size for size in report["sizes"] if size["replica_groups"] == groups]
        found = {server["product"]: server["wall_s"]["median"] for server in size["servers"]}
        return _pair(found, OURS, TORCHFT, 1)

    return read


def _restart(report: Report) -> tuple[str, str]:
    ours, torchrun = (statistics.median(report[name]["after_s"]) for name in ("in_process", "torchrun"))
    return f"{ours:.2f} s, in process", f"{torchrun:.2f} s"


def _node_loss(report: Report) -> tuple[str, str | None]:
    by_backend = [
        [loss["recovered_s"] for loss in report["losses"] if loss["backend"] == backend.name]
        for backend in (LIGHTHOUSE, C10D)
    ]
    ours, c10d = map(_seconds, by_backend)
    return ours or "never", c10d


def _heal(report: Report) -> tuple[str, str | None]:
    found = {row["kind"]: row["seconds_per_gib"]["median"] for row in report["results"]}
    torchft = found.get("torchft")
    return f"{found['hold']:.2f} s", None if torchft is None else f"{torchft:.2f} s, without checksums"


def _added(report: Report) -> tuple[str, str | None]:
    found = {name: row["added_s"]["median"] for name, row in report["results"].items()}
    return _pair(found, "ours", "torchft", 1)


def _lost(report: Report) -> tuple[str, str]:
    killed = report["keep_every_1"]["kills"]
    again_s = statistics.median(each["again_s"] for each in killed)
    return f"at most {max(each['lost'] for each in killed)}, and {again_s:.2f} s", "all since the last checkpoint"


def _slow(report: Report) -> tuple[str, str]:
    found = {row["shares_by_speed"]: row["ideal_s"] / row["step_s"] for row in report["results"]}
    return f"{found[True]:.2f}", f"{found[False]:.2f}"


def _noticed(report: Report) -> tuple[str, None]:
    return f"{sum(each['discards'] for each in report['results'])} in {len(report['results']):,} notices", None


def _sums(report: Report) -> tuple[str, None]:
    percent = error_of(report["results"][0])
    return f"{percent:.4f}%" if percent >= LEAST_PERCENT else f"< {LEAST_PERCENT}%", None


ROWS = (
    Row("A group is killed: time until the other groups commit a step", "recovery", _loss("kill-group")),
    Row("A rank raises an exception: time until all ranks train again", "restart", _restart),
    Row("A torchrun node is killed: time until the other nodes train again", "torchrun", _node_loss),
    Row(
        "A rank is killed and its manager survives: time until the other groups commit a step",
        "recovery",
        _loss("kill-rank"),
    ),
    Row(
        "A group is stopped, with a heartbeat timeout of 2 s: time until the other groups commit a step",
        "recovery",
        _loss("stop"),
    ),
    Row("Quorum and commit per step, without failures", "step_overhead", _calls(OWN_CLIENT)),
    Row(
        "Quorum and commit per step, with torchft's client and Lighthouse's daemons",
        "step_overhead",
        _calls(SAME_CLIENT),
    ),
    Row("A quorum round (all groups request and receive a quorum) with 10 groups", "quorum_round", _round(10)),
    Row("A quorum round (all groups request and receive a quorum) with 1,000 groups", "quorum_round", _round(1000)),
    Row("Copy of 1 GiB of state to a returning group over loopback", "heal", _heal),
    Row("Time per DDP step in addition to torch's DDP", "step_time", _added),
    Row(
        "All ranks of all groups are killed, with `--keep-every 1`: steps lost, and time until training again without "
        "the import of torch",
        "keepers",
        _lost,
    ),
    Row("One of four groups is three times slower: throughput, divided by the ideal", "stragglers", _slow),
    Row(
        "Groups are preempted with notice at random moments: steps that other groups lose",
        "preemption",
        _noticed,
    ),
    Row("`lighthouse report`: difference between its sums and wall time times groups", "report", _sums),
)
"""The claims; README.md shows the first ones. Times are medians, except for the three kills of torchrun nodes."""


def _pair(seconds: Mapping[str, float], ours: str, other: str, digits: int) -> tuple[str, str | None]:
    return _ms(seconds[ours], digits), _ms(seconds[other], digits) if other in seconds else None


def _ms(seconds: float, digits: int) -> str:
    return f"> {GIVE_UP_S * 1e3:.0f} ms" if math.isinf(seconds) else f"{seconds * 1e3:.{digits}f} ms"


def _seconds(values: Iterable[float | None]) -> str | None:
    """Return the range of times until recovery, of which None means that the job never recovered."""
    found = list(values)
    times = sorted(value for value in found if value is not None)
    ends = [f"{times[0]:.1f} to {times[-1]:.1f} s" if len(times) > 1 else f"{times[0]:.1f} s"] if times else []
    return ", or ".join([*ends, *(["never"] if None in found else [])]) or None


def render(rows: Iterable[Row], reports: Mapping[str, Report], page: str) -> str:
    """Return a Markdown table, followed by a sentence with date, machine and commit."""
    machines = [report["machine"] for report in reports.values()]
    loads = [machine["load_average"] for machine in machines]
    lines = [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER), *(row.line(reports, page) for row in rows)]
    about = f"Measured on {machine_text(machines[0], f'{min(loads):.1f} to {max(loads):.1f}')}."
    return "\n".join(lines) + f"\n\n{about}\n"


def replace(path: Path, text: str) -> None:
    """Replace what stands between the two markers of a page.

    Raises:
        click.ClickException: The page does not have both markers once.
    """
    page = path.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after:
        raise click.ClickException(f"{path} needs {BEGIN.strip()} and {END.strip()}, each once")
    path.write_text(before + begin + text + end + after)


def run(name: str, options: Sequence[str], folder: Path) -> Report:
    """Run a benchmark in a process of its own, and return its report."""
    path = folder / f"{name}.json"
    click.echo(f"\n## {name}\n")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path)], cwd=ROOT, check=False
    )
    if done.returncode != 0:
        raise click.ClickException(f"benchmarks.{name} failed with status {done.returncode}")
    return json.loads(path.read_text())


@click.command()
@click.option("--reports", type=click.Path(path_type=Path), help="Keep the reports here. Existing reports are reused.")
@click.option("--print", "is_printed_only", is_flag=True, help="Print the tables, but change no file.")
def main(reports: Path | None, is_printed_only: bool) -> None:
    """Run every benchmark of the README's and the docs' tables, and write both tables."""
    with TemporaryDirectory() as temporary:
        folder = reports or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            name: json.loads((folder / f"{name}.json").read_text())
            if (folder / f"{name}.json").exists()
            else run(name, OPTIONS.get(name, ()), folder)
            for name in dict.fromkeys(row.benchmark for row in ROWS)
        }
    readme = render(ROWS[:IN_README], found, "benchmarks/README.md")
    comparison = render(ROWS, found, "../../benchmarks/README.md")
    click.echo(f"\n{comparison}")
    if not is_printed_only:
        replace(ROOT / "README.md", readme)
        replace(ROOT / "docs/concepts/comparison.md", comparison)


if __name__ == "__main__":
    main()
