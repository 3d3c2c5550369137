"""Measure the overhead of fault tolerance in a training step without failures: a transformer in three groups over gloo.

torch's DistributedDataParallel, ours, and torchft's take turns of ten steps in the same three processes. torch's has
two turns per round, and the difference between these two is the noise of the machine.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import OURS, TORCHFT, Daemon, start_lighthouse, start_manager
from benchmarks.support.figures import Bar, Measured, Spread, benchmark, ratios, spread, table, take_turns
from benchmarks.support.torchft_native import released_version
from examples.ports import free_port

GROUPS = 3
PARTS = ("zero_grad", "forward", "backward", "step")
CPU_BAR_S, PATH_BAR_S = 0.002, 0.0015
TORCHFT_SHARE = 1 / 3
"""Maximum ratio of our added time to torchft's."""

Block = dict[str, Any]
"""step_s: the median step of all ranks; parts_s: the median of each part; cpu_s: per step and rank, daemons too."""


class Arena:
    """The trainers, and the contenders' daemons."""

    def __init__(self, children: Children) -> None:
        self.lighthouse = start_lighthouse(children, OURS, GROUPS)
        store_port = free_port()
        self.managers = [
            start_manager(children, OURS, self.lighthouse, f"group_{i}", store=f"127.0.0.1:{store_port}")
            for i in range(GROUPS)
        ]
        self.torchft = start_lighthouse(children, TORCHFT, GROUPS) if released_version() else None
        theirs = self.torchft.address if self.torchft else ""
        self.ranks = [
            children.start(
                f"trainer {i}", "-m", "benchmarks.support.trainer", str(i), str(store_port), m.address, theirs
            )
            for i, m in enumerate(self.managers)
        ]
        for rank in self.ranks:
            rank.read_line()

    def measure(self, contender: str, steps: int) -> Block:
        daemons = self._daemons(contender)
        began_at = sum(daemon.cpu_s() for daemon in daemons)
        for rank in self.ranks:
            rank.send(contender=contender, steps=steps)
        told = [rank.answer() for rank in self.ranks]
        cpu_s = sum(one["cpu_s"] for one in told) + sum(daemon.cpu_s() for daemon in daemons) - began_at
        every = [parts for one in told for parts in one["parts_s"]]
        return {
            "step_s": statistics.median(sum(parts) for parts in every),
            "parts_s": [statistics.median(column) for column in zip(*every, strict=True)],
            "cpu_s": cpu_s / steps / GROUPS,
        }

    def _daemons(self, contender: str) -> list[Child]:
        found: list[Daemon] = {"ours": [self.lighthouse, *self.managers], "bare": []}.get(
            contender, [self.torchft] if self.torchft else []
        )
        return [daemon.child for daemon in found]


def run_all(rounds: int, steps: int) -> dict[str, list[Block]]:
    """Return the blocks of each contender. The first round does not count. "again" is the second turn of "bare"."""
    turns = {"bare": "bare", "ours": "ours", "again": "bare"} | ({"torchft": "torchft"} if released_version() else {})
    with Children() as children:
        arena = Arena(children)
        contenders = {turn: partial(arena.measure, name, steps) for turn, name in turns.items()}
        return take_turns(contenders, rounds)


def _report(found: Sequence[Block], bare: Sequence[Block], again: Sequence[Block]) -> dict[str, Any]:
    def column(blocks: Sequence[Block], key: str) -> list[float]:
        return [block[key] for block in blocks]

    def added(key: str) -> Spread:
        """Return median and quartiles of the increase over the mean of both "bare" turns of the same round."""
        base = [(x + y) / 2 for x, y in zip(column(bare, key), column(again, key), strict=True)]
        over = [mine - other for mine, other in zip(column(found, key), base, strict=True)]
        low, middle, high = statistics.quantiles(over, n=4) if len(over) > 1 else over * 3
        return Spread(middle, low, high)

    parts = zip(*(block["parts_s"] for block in found), strict=True)
    return {
        "step_s": spread(column(found, "step_s")),
        "parts_s": [statistics.median(values) for values in parts],
        "added_s": added("step_s"),
        "added_cpu_s": added("cpu_s"),
        "ratio": ratios(column(found, "step_s"), column(bare, "step_s")),
    }


NAMES = {"bare": "torch's DDP", "again": "torch's DDP again", "ours": "ours", "torchft": "torchft 0.2"}


def render(reports: Mapping[str, Mapping[str, Any]]) -> str:
    header = [
        "",
        "step ms",
        *(f"{part} ms" for part in PARTS),
        "added ms (quartiles)",
        "added CPU ms",
        "of torch's DDP",
    ]
    return table(header, [_cells(NAMES[name], row) for name, row in reports.items()])


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    parts = [f"{value * 1e3:.1f}" for value in row["parts_s"]]
    added = [row["added_s"].text(2, 1e3), row["added_cpu_s"].text(2, 1e3)]
    return [name, f"{row['step_s'].median * 1e3:.1f}", *parts, *added, row["ratio"].text()]


def bars(reports: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    added, cpu = (reports["ours"][name].median for name in ("added_s", "added_cpu_s"))
    found = [Bar("time added", added, PATH_BAR_S, "s"), Bar("CPU added", cpu, CPU_BAR_S, "s")]
    if (theirs := reports.get("torchft")) is not None:
        found.append(Bar("time added, of torchft's", added / theirs["added_s"].median, TORCHFT_SHARE))
    return found


@benchmark("Two rounds of four steps.", beside_torchft=True)
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True, help="Turns of each contender.")
@click.option("--steps", type=click.IntRange(2), default=10, show_default=True, help="Steps of a turn.")
def main(rounds: int, steps: int, quick: bool) -> Measured:
    """Measure the overhead of fault tolerance in a training step without failures."""
    if quick:
        rounds, steps = 2, 4
    blocks = run_all(rounds, steps)
    results = {name: _report(found, blocks["bare"], blocks["again"]) for name, found in blocks.items()}
    return render(results), bars(results), {"rounds": rounds, "steps": steps, "results": results}


if __name__ == "__main__":
    main()
