"""How long a supervised group takes to come back: a rank is killed, both start again, and have a quorum.

Two ranks without torch (support/restarting_rank.py) under one `lighthouse-manager run`, a lighthouse, no delay between
death and restart but the smallest. Measured are the whole time from the kill to the quorum of both ranks, and the age
of the slower rank's process at that time.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import OURS, start_lighthouse
from benchmarks.support.figures import json_option, show_machine, spread, table, write_json
from lighthouse_runtime.process.children import started_at
from lighthouse_runtime.process.commands import START_MANAGER

RANKS = 2
DELAY_S = 0.001
BAR_S = 1.0


@dataclass(frozen=True, slots=True)
class Restart:
    """`whole_s`: from the kill to the quorum; `from_start_s`: from the start of the slower process."""

    whole_s: float
    from_start_s: float


def supervisor(children: Children, lighthouse: str, runs: int) -> Child:
    options = {
        "--lighthouse": lighthouse,
        "--replica-id": "a",
        "--bind": "127.0.0.1:0",
        "--advertise": "127.0.0.1",
        "--store": "127.0.0.1:1",
        "--nproc-per-node": str(RANKS),
        "--max-restarts": str(runs + 1),
        "--max-startup-failures": "0",
        "--restart-delay": f"{DELAY_S:g}s",
        "--max-restart-delay": f"{DELAY_S:g}s",
        "--log-level": "warning",
    }
    words = [word for option in options.items() for word in option]
    return children.start("supervisor", "-c", START_MANAGER, "run", *words, "-m", "benchmarks.support.restarting_rank")


def ages(lines: Iterator[str], attempt: int) -> list[float]:
    """Of both ranks, when they had their quorum."""
    found: dict[str, float] = {}
    for line in lines:
        words = line.split()
        if words[1:3] == ["quorum", str(attempt)]:
            found[words[3]] = float(words[4])
        if len(found) == RANKS:
            return list(found.values())
    raise click.ClickException("the supervisor has ended")


def rank_below(pid: int) -> int:
    """A rank's pid: the guard's first child."""
    (guard,) = _children(pid)
    return min(_children(guard), key=started_at)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def measure(children: Children, runs: int) -> list[Restart]:
    lighthouse = start_lighthouse(children, OURS, min_replicas=1)
    group = supervisor(children, lighthouse.address, runs)
    lines = group.lines()
    ages(lines, 0)
    restarts: list[Restart] = []
    for attempt in range(1, runs + 1):
        killed_at = time.monotonic()
        os.kill(rank_below(group.pid), signal.SIGKILL)
        found = ages(lines, attempt)
        restarts.append(Restart(time.monotonic() - killed_at, max(found)))
    return restarts


@click.command(help=__doc__)
@click.option("--runs", default=20, show_default=True, help="How many kills.")
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: two kills.")
@check_option
@json_option
def main(runs: int, quick: bool, check: bool, path: Path | None) -> None:
    found = show_machine()
    with Children() as children:
        restarts = measure(children, 2 if quick else runs)
    whole, from_start = (spread([getattr(r, name) for r in restarts]) for name in ("whole_s", "from_start_s"))
    rows = [
        ["a rank is killed, to the quorum of all", whole.text()],
        ["of that: from the start of the process", from_start.text()],
    ]
    click.echo(table(["to the quorum of both, seconds: median (lowest to highest)", f"{len(restarts)} restarts"], rows))
    report = {"whole_s": whole, "from_start_s": from_start, "restarts": restarts}
    write_json(path, {"benchmark": "restart", "machine": found, **report})
    conclude([Bar("process start to first quorum, median", from_start.median, BAR_S, "s")], is_checked=check)


if __name__ == "__main__":
    main()
