"""What a command costs to start: the CPU of its process, by the system's own account, from start to end.

`lighthouse status` asks a lighthouse of this run that knows no job.
"""

import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import ROOT, Children
from benchmarks.support.daemons import OURS, start_lighthouse
from benchmarks.support.figures import Spread, json_option, show_machine, spread, table, write_json
from lighthouse_runtime.process.commands import START_LIGHTHOUSE, START_MANAGER

LIMIT_S = 0.25
ENDS_WITHIN_S = 60.0

Command = tuple[str, str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Start:
    what: str
    cpu_s: Spread


def commands(lighthouse: str) -> list[Command]:
    """What it is called, the code that starts it, and its arguments."""
    return [
        ("lighthouse --help", START_LIGHTHOUSE, ["--help"]),
        ("lighthouse status", START_LIGHTHOUSE, ["status", "--lighthouse", lighthouse]),
        ("lighthouse-manager --help", START_MANAGER, ["--help"]),
    ]


def measure(times: int) -> list[Start]:
    """The commands in turn, `times` times; once before, so that every module is compiled."""
    with Children() as children:
        asked = commands(start_lighthouse(children, OURS, 1).address)
        rounds = [[_cpu_s(code, arguments) for _, code, arguments in asked] for _ in range(times + 1)]
    return [Start(what, spread(found)) for (what, _, _), *found in zip(asked, *rounds[1:], strict=True)]


def _cpu_s(code: str, arguments: Sequence[str]) -> float:
    """User and system time of the process. Raises subprocess.CalledProcessError if it fails."""
    before = _ended_children_s()
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=ENDS_WITHIN_S)
    return _ended_children_s() - before


def _ended_children_s() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def render(starts: Sequence[Start]) -> str:
    return table(["command", "CPU s, median (least to most)"], [[each.what, each.cpu_s.text(3)] for each in starts])


def bars(starts: Sequence[Start]) -> list[Bar]:
    return [Bar(each.what, each.cpu_s.median, LIMIT_S, "s") for each in starts]


@click.command()
@click.option("--times", type=click.IntRange(1), default=15, show_default=True, help="Starts of each command.")
@click.option("--quick", is_flag=True, help="3 starts of each.")
@check_option
@json_option
def main(times: int, quick: bool, check: bool, path: Path | None) -> None:
    """What a command costs to start."""
    found = show_machine()
    starts = measure(3 if quick else times)
    click.echo(render(starts))
    write_json(path, {"benchmark": "cli_start", "machine": found, "starts": starts})
    conclude(bars(starts), is_checked=check)


if __name__ == "__main__":
    main()
