"""Kill all ranks of all groups, and count the steps that are lost; and measure what keeping the state costs.

Two replica groups of one rank train under supervisors with --keep-every. At random moments, every rank is killed with
SIGKILL. The supervisors live on, and the ranks continue from the states that they have kept. Every committed step is
recorded with a digest of the weights and the optimizer's state, and compared with a run in which nothing is killed.

The cost is measured with one rank and 1 GiB of state, which keeps its state in every second block of 16 steps.
"""

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.cluster import wait_until
from benchmarks.support.daemons import OURS, start_lighthouse, start_supervisor
from benchmarks.support.figures import Bar, Measured, benchmark, spread, table
from examples.ports import free_port

RANK = "benchmarks.support.kept_rank"
NAMES = ("a", "b")
TIMEOUT_S = 300.0
PACE_S = 0.02
RESTARTS = [
    *("--max-restarts", "60000", "--max-startup-failures", "0"),
    *("--restart-delay", "500ms", "--max-restart-delay", "500ms"),
]
GIB_WIDTH = 9456
"""Width of a network whose parameters and AdamW state have 1 GiB."""
BLOCK = 16
"""Interval of the states that are kept in the measurement of the cost."""


class Event(NamedTuple):
    """A line that a rank has written (kept_rank.py)."""

    at: float
    what: str
    step: int
    more: str | int


@dataclass(frozen=True, slots=True)
class Killed:
    lost: int
    """Steps that were committed before the kill and had to be repeated."""
    again_s: float
    """Time from the kill until the last group has committed a step, without `import_s`."""
    import_s: float
    """Time from the start of the last rank until all ranks have imported torch and agent_client."""


class Job:
    """Groups of one rank under supervisors."""

    def __init__(
        self, children: Children, folder: Path, *options: str, script: Sequence[str] = (), names: Sequence[str] = NAMES
    ) -> None:
        folder.mkdir()
        self._folder, self._names = folder, names
        lighthouse = start_lighthouse(children, OURS, len(names))
        self._supervisors: list[Child] = []
        for name in names:
            given = ["--master-port", str(free_port()), *RESTARTS, *options]
            ranks = start_supervisor(children, lighthouse, name, 1, given, [RANK, str(folder), *script])
            self._supervisors.append(ranks)

    def events(self, name: str) -> list[Event]:
        path = self._folder / f"{name}-0"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Event(*json.loads(line)) for line in lines]

    def digests(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for event in (event for name in NAMES for event in self.events(name) if event.what == "commit"):
            found.setdefault(event.step, set()).add(str(event.more))
        return found

    def wait_for(self, steps: int, since: float = 0.0, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until each group has committed a number of steps after `since`."""

        def is_done() -> bool:
            return all(
                sum(event.what == "commit" and event.at > since for event in self.events(name)) >= steps
                for name in self._names
            )

        wait_until(is_done, timeout_s, f"{steps} steps of {', '.join(self._names)}", self._supervisors)

    def end(self) -> None:
        for supervisor in self._supervisors:
            supervisor.end()

    def kill(self) -> Killed:
        """Kill all ranks, and wait until all groups train again."""
        pids = [int(next(e for e in reversed(self.events(name)) if e.what == "pid").more) for name in NAMES]
        killed_at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(2 * PACE_S)  # a commit that was under way at the time of the kill is written by now
        done_at = time.monotonic()
        self.wait_for(1, done_at)
        of_groups = [self.events(name) for name in NAMES]
        last = max(e.step for events in of_groups for e in events if e.what == "commit" and e.at < done_at)
        later = [[e for e in events if e.at > done_at] for events in of_groups]
        first = [next(e for e in events if e.what == "commit") for events in later]
        started_at, imported_at = _last(later, "starts"), _last(later, "imported")
        again_s = started_at - killed_at + _last(later, "commit") - imported_at
        return Killed(last - (min(commit.step for commit in first) - 1), again_s, imported_at - started_at)


def _last(groups: Sequence[Sequence[Event]], what: str) -> float:
    """Return when the last group has reported `what` for the first time."""
    return max(next(event.at for event in events if event.what == what) for events in groups)


def measure_kills(children: Children, every: int, kills: int) -> tuple[list[Killed], int]:
    """Return what each kill has cost, and the number of steps whose state differs from an undisturbed run."""
    job = Job(children, children.folder / f"keep-{every}", "--keep-every", str(every), script=("--pace", str(PACE_S)))
    found: list[Killed] = []
    for _ in range(kills):
        job.wait_for(2 * every + random.randrange(2 * every + 10), time.monotonic())
        time.sleep(random.uniform(0, 2 * PACE_S))
        found.append(job.kill())
    killed = job.digests()
    steps = max(killed)
    job.end()
    whole = Job(children, children.folder / f"undisturbed-{every}", script=("--steps", str(steps)))
    whole.wait_for(steps)
    whole.end()
    wanted = whole.digests()
    return found, sum(killed.get(step) != wanted[step] for step in range(1, steps + 1))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of each block of steps without and with a kept state, and what the rank has waited for it in each."""

    without_s: list[float]
    kept_s: list[float]
    waited_s: list[float]

    @property
    def share_waited(self) -> float:
        return statistics.median(self.waited_s) / statistics.median(self.without_s)


def measure_cost(children: Children, blocks: int, width: int, batch: int) -> Cost:
    steps = BLOCK * 2 * (blocks + 1) + 2
    script = ["--steps", str(steps), "--width", str(width), "--batch", str(batch), "--no-digest"]
    script += ["--alternate", str(BLOCK)]
    job = Job(children, children.folder / "cost", "--keep-every", str(BLOCK), script=script, names=NAMES[:1])

    job.wait_for(steps - 1, timeout_s=20 * TIMEOUT_S)
    at, waited = ({e.step: e for e in job.events(NAMES[0]) if e.what == what} for what in ("commit", "kept"))
    # The state of step n is copied during the next step, and the script keeps from step 2 * BLOCK * i.
    firsts = range(2 * BLOCK, BLOCK * 2 * (blocks + 1), BLOCK)
    spans = [at[first + BLOCK].at - at[first].at for first in firsts]
    return Cost(spans[1::2], spans[0::2], [float(waited[first + 1].more) for first in firsts[0::2]])


def percent_text(percent: float) -> str:
    return f"{abs(percent):.1f}% {'less' if percent < 0 else 'more'}"


@benchmark("3 kills, and the cost with 64 MiB.")
@click.option("--kills", type=click.IntRange(1), default=100, show_default=True, help="Kills with k = 1.")
@click.option("--blocks", type=click.IntRange(1), default=10, show_default=True, help="Blocks of steps to measure.")
def main(kills: int, blocks: int, quick: bool) -> Measured:
    """Kill all ranks of all groups, count the lost steps, and measure what keeping the state costs."""
    kills, blocks, width = (3, 2, GIB_WIDTH // 4) if quick else (kills, blocks, GIB_WIDTH)
    rows: list[list[str]] = []
    bars: list[Bar] = []
    report: dict[str, object] = {}
    with Children() as children:
        for every, count in ((1, kills), (16, max(2, kills // 10))):
            killed, different = measure_kills(children, every, count)
            report[f"keep_every_{every}"] = {"kills": killed, "different_steps": different}
            lost, again = [each.lost for each in killed], spread([each.again_s for each in killed])
            imports = spread([each.import_s for each in killed])
            rows.append(
                [str(every), str(count), f"{sum(lost)} ({max(lost)})", again.text(), imports.text(), str(different)]
            )
            bars += [
                Bar(f"steps lost by a kill, k = {every}", max(lost), every),
                Bar(f"seconds until training again, k = {every}", again.median, 2.0, "s"),
                Bar(f"steps that differ from an undisturbed run, k = {every}", different, 0),
            ]
    with Children() as children:
        cost = measure_cost(children, blocks, width, 8 if quick else 96)
        report["cost"] = cost
    header = ["k", "kills", "steps lost (most by one)", "s until training again", "s of import", "steps that differ"]
    size = "64 MiB" if quick else "1 GiB"
    step_s = spread([each / BLOCK for each in cost.without_s])
    more = spread([100 * (one / other - 1) for one, other in zip(cost.kept_s, cost.without_s, strict=True)])
    text = f"{table(header, rows)}\n\n{size} of state, k = {BLOCK}: a step takes {step_s.text()} s without a keeper. "
    few, many = percent_text(more.low), percent_text(more.high)
    text += f"Steps with one take {percent_text(more.median)} time ({few} to {many}). "
    text += f"The rank waits {spread(cost.waited_s).text(3)} s for a copy."
    bars.append(Bar(f"share of the time that a rank waits for copies, k = {BLOCK}", 100 * cost.share_waited, 0.5, "%"))
    return text, bars, report


if __name__ == "__main__":
    main()
