"""Measure a step without failures: Quorum and ShouldCommit, in three replica groups of one rank each.

The contenders take turns: torchft's released daemons and ours, both with torchft's client, so that both contact the
lighthouse in every step, and ours with our client and a standing quorum. Each contender has a lighthouse, three
managers and three ranks, each in a separate process. The ranks step without pauses, so the figures include the
competition of seven busy processes for the machine's cores.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.support.children import Children
from benchmarks.support.daemons import OURS, TORCHFT, scrape, start_lighthouse, start_manager
from benchmarks.support.figures import (
    Bar,
    Measured,
    benchmark,
    of_torchft,
    percentile,
    ratios,
    spread,
    table_of,
    take_turns,
)
from benchmarks.support.torchft_native import released_version

GROUPS = 3
CALLS = ("quorum_s", "should_commit_s", "both_s")


@dataclass(frozen=True, slots=True)
class Setup:
    name: str
    product: str
    client: str


REFERENCE = Setup("torchft 0.2, its client", TORCHFT, TORCHFT)
SAME_CLIENT = Setup("ours, torchft's client", OURS, TORCHFT)
OWN_CLIENT = Setup("ours, our client, standing", OURS, OURS)


class Arena:
    """Daemons and ranks of one setup. A block is some steps."""

    def __init__(self, children: Children, setup: Setup, steps: int) -> None:
        self._setup = setup
        self._steps = steps
        self._lighthouse = start_lighthouse(children, setup.product, GROUPS)
        names = [f"group_{i}" for i in range(GROUPS)]
        managers = [start_manager(children, setup.product, self._lighthouse, name) for name in names]
        self._daemons = [self._lighthouse, *managers]
        program = ("-m", "benchmarks.support.rank", setup.client)
        self._ranks = [children.start("a rank", *program, manager.address) for manager in managers]
        for rank in self._ranks:
            rank.read_line()

    def measure(self) -> dict[str, Any]:
        """Return the seconds of each call of each rank and, per step, the daemons' CPU, round trips and calls."""
        steps = self._steps
        began_at, asked = self._cpu_s(), self._lighthouse_calls()
        for rank in self._ranks:
            rank.send(steps=steps)
        told = [rank.answer() for rank in self._ranks]
        quorum_s, should_commit_s = ([s for one in told for s in one[call]] for call in CALLS[:2])
        return {
            "quorum_s": quorum_s,
            "should_commit_s": should_commit_s,
            "both_s": list(map(operator.add, quorum_s, should_commit_s)),
            "daemons_cpu_s": (self._cpu_s() - began_at) / steps,
            "round_trips": max(one["round_trips"] for one in told),
            "lighthouse_calls": (self._lighthouse_calls() - asked) / steps,
        }

    def _cpu_s(self) -> float:
        return sum(daemon.child.cpu_s() for daemon in self._daemons)

    def _lighthouse_calls(self) -> float:
        """Return the number of completed calls and quorum rounds, or 0 for torchft's lighthouse."""
        if self._setup.product != OURS:
            return 0.0
        counted = ("lighthouse_grpc_calls_total", "lighthouse_quorum_rounds_")
        return sum(value for name, value in scrape(self._lighthouse).items() if name.startswith(counted))


def run_all(blocks: int, steps: int) -> list[dict[str, Any]]:
    setups = [REFERENCE, SAME_CLIENT, OWN_CLIENT] if released_version() else [OWN_CLIENT]
    with Children() as children:
        arenas = {setup.name: Arena(children, setup, steps) for setup in setups}
        found = take_turns({name: arena.measure for name, arena in arenas.items()}, blocks)
    return [_report(name, measured, found.get(REFERENCE.name, ())) for name, measured in found.items()]


def _report(name: str, blocks: Sequence[Mapping[str, Any]], torchfts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    every = {call: [value for block in blocks for value in block[call]] for call in CALLS}
    both_s, torchfts_both_s = ([spread(block["both_s"]).median for block in each] for each in (blocks, torchfts))
    cpu_s, torchfts_cpu_s = ([block["daemons_cpu_s"] for block in each] for each in (blocks, torchfts))
    return {
        "contender": name,
        "calls": {
            call: {"median_s": spread(values).median, "p99_s": percentile(values, 0.99)}
            for call, values in every.items()
        },
        "ratio": ratios(both_s, torchfts_both_s) if torchfts else None,
        "daemons_cpu_s": spread(cpu_s),
        "daemons_cpu_ratio": ratios(cpu_s, torchfts_cpu_s) if torchfts else None,
        **{key: max(block[key] for block in blocks) for key in ("round_trips", "lighthouse_calls")},
    }


COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "daemons, client": lambda row: row["contender"],
    "quorum ms (p99)": lambda row: _time(row, "quorum_s"),
    "commit ms (p99)": lambda row: _time(row, "should_commit_s"),
    "both ms (p99)": lambda row: _time(row, "both_s"),
    "both, of torchft's": lambda row: _ratio(row, "ratio"),
    "daemons' CPU ms": lambda row: row["daemons_cpu_s"].text(2, 1e3),
    "CPU, of torchft's": lambda row: _ratio(row, "daemons_cpu_ratio"),
    "round trips": lambda row: f"{row['round_trips']:.2f}",
    "lighthouse calls": lambda row: "-" if row["contender"] == REFERENCE.name else f"{row['lighthouse_calls']:.2f}",
}


def _time(row: Mapping[str, Any], call: str) -> str:
    times = row["calls"][call]
    return f"{times['median_s'] * 1e3:.2f} ({times['p99_s'] * 1e3:.2f})"


def _ratio(row: Mapping[str, Any], name: str) -> str:
    return of_torchft(row[name], is_torchft=row["contender"] == REFERENCE.name)


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    standing = next(row for row in results if row["contender"] == OWN_CLIENT.name)
    found = [
        Bar("standing: round trips a step", standing["round_trips"], 1),
        Bar("standing: lighthouse calls a step", standing["lighthouse_calls"], 0),
    ]
    if (ratio := standing["ratio"]) is not None:
        found.append(Bar("standing: both calls, of torchft's", ratio.median, 0.5))
    return found


@benchmark("Seconds instead of a minute: two blocks of 30 steps.", beside_torchft=True)
@click.option("--blocks", type=click.IntRange(1), default=15, show_default=True, help="Measured blocks each.")
@click.option("--steps", type=click.IntRange(2), default=100, show_default=True, help="Steps of a block.")
def main(blocks: int, steps: int, quick: bool) -> Measured:
    """Measure Quorum and ShouldCommit per step, with our daemons and torchft's."""
    if quick:
        blocks, steps = 2, 30
    results = run_all(blocks, steps)
    report = {"groups": GROUPS, "blocks": blocks, "steps_per_block": steps, "contenders": results}
    return table_of(COLUMNS, results), bars(results), report


if __name__ == "__main__":
    main()
