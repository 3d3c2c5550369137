"""Measure a step without failures: Quorum and ShouldCommit, in three replica groups of one rank each.

The contenders take turns: torchft's released daemons and ours, both with torchft's client, so that both contact the
lighthouse in every step, and ours with our client and a standing quorum. Each contender has a lighthouse, three
managers and three ranks, each in a separate process. The ranks step without pauses, so the figures include the
competition of seven busy processes for the machine's cores.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.support.children import Children
from benchmarks.support.daemons import OURS, TORCHFT, start_lighthouse, start_manager
from benchmarks.support.figures import Bar, benchmark, finish, percentile, ratios, show_machine, spread, table
from benchmarks.support.scrape import scrape
from benchmarks.support.torchft_native import released_version

GROUPS = 3
CALLS = ("quorum_s", "should_commit_s", "both_s")


Block = dict[str, Any]
"""Measurements of consecutive steps: the seconds of each call of each rank; and, per step, the CPU of all daemons, the
round trips of a rank, and the calls to our lighthouse without heartbeats."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    product: str
    client: str


REFERENCE = Contender("torchft 0.2, its client", TORCHFT, TORCHFT)
SAME_CLIENT = Contender("ours, torchft's client", OURS, TORCHFT)
OWN_CLIENT = Contender("ours, our client, standing", OURS, OURS)


class Arena:
    """One contender: daemons, ranks, and measurements."""

    def __init__(self, children: Children, contender: Contender) -> None:
        self.contender = contender
        self.blocks: list[Block] = []
        self._lighthouse = start_lighthouse(children, contender.product, GROUPS)
        names = [f"group_{i}" for i in range(GROUPS)]
        managers = [start_manager(children, contender.product, self._lighthouse, name) for name in names]
        self._daemons = [self._lighthouse, *managers]
        program = ("-m", "benchmarks.support.rank", contender.client)
        self._ranks = [children.start("a rank", *program, manager.address) for manager in managers]
        for rank in self._ranks:
            rank.read_line()

    def measure(self, steps: int) -> Block:
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
        if self.contender.product != OURS:
            return 0.0
        counted = ("lighthouse_grpc_calls_total", "lighthouse_quorum_rounds_")
        return sum(value for name, value in scrape(self._lighthouse).items() if name.startswith(counted))

    def medians(self, call: str) -> list[float]:
        return [spread(block[call]).median for block in self.blocks]

    def values(self, name: str) -> list[float]:
        return [block[name] for block in self.blocks]


def run_all(blocks: int, steps: int) -> list[dict[str, Any]]:
    """Measure `blocks` blocks per contender, in turn. The first turn does not count."""
    contenders = [REFERENCE, SAME_CLIENT, OWN_CLIENT] if released_version() else [OWN_CLIENT]
    with Children() as children:
        arenas = [Arena(children, contender) for contender in contenders]
        for turn in range(blocks + 1):
            for arena in arenas:
                block = arena.measure(steps)
                if turn > 0:
                    arena.blocks.append(block)
        return [_report(arena, arenas[0]) for arena in arenas]


def _report(arena: Arena, reference: Arena) -> dict[str, Any]:
    is_compared, cpu_s = reference.contender is REFERENCE, arena.values("daemons_cpu_s")
    every = {call: [value for block in arena.blocks for value in block[call]] for call in CALLS}
    return {
        "contender": arena.contender.name,
        "calls": {
            call: {"median_s": spread(values).median, "p99_s": percentile(values, 0.99)}
            for call, values in every.items()
        },
        "ratio": ratios(arena.medians("both_s"), reference.medians("both_s")) if is_compared else None,
        "daemons_cpu_s": spread(cpu_s),
        "daemons_cpu_ratio": ratios(cpu_s, reference.values("daemons_cpu_s")) if is_compared else None,
        "round_trips": max(arena.values("round_trips")),
        "lighthouse_calls": max(arena.values("lighthouse_calls")),
    }


def render(results: Sequence[Mapping[str, Any]]) -> str:
    times = ["quorum ms (p99)", "commit ms (p99)", "both ms (p99)"]
    cpu = ["daemons' CPU ms", "CPU, of torchft's"]
    header = ["daemons, client", *times, "both, of torchft's", *cpu, "round trips", "lighthouse calls"]
    return table(header, [_cells(row) for row in results])


def _cells(row: Mapping[str, Any]) -> list[str]:
    calls = [row["calls"][call] for call in CALLS]
    times = [f"{call['median_s'] * 1e3:.2f} ({call['p99_s'] * 1e3:.2f})" for call in calls]
    cpu = [row["daemons_cpu_s"].text(2, 1e3), _ratio(row, row["daemons_cpu_ratio"])]
    calls_made = f"{row['lighthouse_calls']:.2f}" if row["contender"] != REFERENCE.name else "-"
    trips = [f"{row['round_trips']:.2f}", calls_made]
    return [row["contender"], *times, _ratio(row, row["ratio"]), *cpu, *trips]


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    standing = next(row for row in results if row["contender"] == OWN_CLIENT.name)
    found = [
        Bar("standing: round trips a step", standing["round_trips"], 1),
        Bar("standing: lighthouse calls a step", standing["lighthouse_calls"], 0),
    ]
    if (ratio := standing["ratio"]) is not None:
        found.append(Bar("standing: both calls, of torchft's", ratio.median, 0.5))
    return found


def _ratio(row: Mapping[str, Any], ratio: Any) -> str:
    if ratio is None:
        return "-"
    return "1" if row["contender"] == REFERENCE.name else ratio.text()


@benchmark("Seconds instead of a minute: two blocks of 30 steps.")
@click.option("--blocks", type=click.IntRange(1), default=15, show_default=True, help="Measured blocks each.")
@click.option("--steps", type=click.IntRange(2), default=100, show_default=True, help="Steps of a block.")
def main(blocks: int, steps: int, quick: bool, check: bool, path: Path | None) -> None:
    """Measure Quorum and ShouldCommit per step, with our daemons and torchft's."""
    if quick:
        blocks, steps = 2, 30
    machine = show_machine(beside_torchft=True)
    results = run_all(blocks, steps)
    settings = {"groups": GROUPS, "blocks": blocks, "steps_per_block": steps}
    report = {"benchmark": "step_overhead", "machine": machine, **settings, "contenders": results}
    finish(render(results), report, bars(results), is_checked=check, path=path)


if __name__ == "__main__":
    main()
