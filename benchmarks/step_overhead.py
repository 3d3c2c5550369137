"""What a step costs without any failure: Quorum and ShouldCommit, three replica groups of one rank each.

Torchft's released daemons and ours in turn, under the same client (torchft's), so that ours ask the lighthouse at every
step, too; then ours under our own client, whose quorum stands. Every contender has a lighthouse, three managers and
three ranks, each a process; the ranks go from step to step without a pause, so the figures contain what seven busy
processes do to each other on the machine's cores.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import OURS, OURS_BY_TLS, TORCHFT, Daemon, start_lighthouse, start_manager
from benchmarks.support.figures import json_option, percentile, ratios, show_machine, spread, table, write_json
from benchmarks.support.scrape import scrape
from benchmarks.support.torchft_native import released_version

GROUPS = 3
CALLS = ("quorum_s", "should_commit_s", "both_s")


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row. Seconds of each call of each rank; per step the CPU of all daemons, and of all ranks, a
    rank's round trips, and what our lighthouse was asked (beats are not asked)."""

    quorum_s: list[float]
    should_commit_s: list[float]
    both_s: list[float]
    daemons_cpu_s: float
    ranks_cpu_s: float
    round_trips: float
    lighthouse_calls: float


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    product: str
    client: str


REFERENCE = Contender("torchft 0.2, its client", TORCHFT, TORCHFT)
SAME_CLIENT = Contender("ours, torchft's client", OURS, TORCHFT)
OWN_CLIENT = Contender("ours, our client, standing", OURS, OURS)
BY_TLS = Contender("ours, our client, standing, TLS", OURS_BY_TLS, OURS)
TLS_BAR = 1.15
_COUNTED = (SAME_CLIENT.name, OWN_CLIENT.name)  # whose metrics are scraped, without TLS


@dataclass(slots=True)
class Arena:
    """One contender: its daemons, its ranks, what was measured so far."""

    contender: Contender
    daemons: list[Daemon]
    ranks: list[Child]
    blocks: list[Block] = field(default_factory=list[Block])

    @classmethod
    def open(cls, children: Children, contender: Contender) -> "Arena":
        lighthouse = start_lighthouse(children, contender.product, GROUPS)
        names = [f"group_{i}" for i in range(GROUPS)]
        managers = [start_manager(children, contender.product, lighthouse, name) for name in names]
        ranks = [
            children.start("a rank", "-m", "benchmarks.support.rank", contender.client, m.address) for m in managers
        ]
        for rank in ranks:
            rank.read_line()
        return cls(contender, [lighthouse, *managers], ranks)

    def measure(self, steps: int) -> Block:
        began_at, asked = self._cpu_s(), self._lighthouse_calls()
        for rank in self.ranks:
            rank.send(steps=steps)
        told = [rank.answer() for rank in self.ranks]
        quorum_s = [value for one in told for value in one["quorum_s"]]
        should_commit_s = [value for one in told for value in one["should_commit_s"]]
        both_s = list(map(operator.add, quorum_s, should_commit_s))
        return Block(
            quorum_s,
            should_commit_s,
            both_s,
            daemons_cpu_s=(self._cpu_s() - began_at) / steps,
            ranks_cpu_s=sum(one["cpu_s"] for one in told) / steps,
            round_trips=max(one["round_trips"] for one in told),
            lighthouse_calls=(self._lighthouse_calls() - asked) / steps,
        )

    def _cpu_s(self) -> float:
        return sum(daemon.child.cpu_s() for daemon in self.daemons)

    def _lighthouse_calls(self) -> float:
        """Calls that have ended, and quorums handed out, at ours."""
        if self.contender.product != OURS:
            return 0.0
        counted = scrape(self.daemons[0]).items()
        return sum(
            value
            for name, value in counted
            if name.startswith(("lighthouse_grpc_calls_total", "lighthouse_quorum_rounds_"))
        )

    def medians(self, call: str) -> list[float]:
        return [spread(getattr(block, call)).median for block in self.blocks]

    def cpu_s(self) -> list[float]:
        return [block.daemons_cpu_s for block in self.blocks]


def contenders(*, with_tls: bool) -> list[Contender]:
    plain = [REFERENCE, SAME_CLIENT, OWN_CLIENT] if released_version() else [OWN_CLIENT]
    return [*plain, BY_TLS] if with_tls else plain


def run_all(blocks: int, steps: int, *, with_tls: bool = False) -> list[dict[str, Any]]:
    """All contenders in turn, `blocks` times, after one turn that is not counted."""
    with Children() as children:
        arenas = [Arena.open(children, contender) for contender in contenders(with_tls=with_tls)]
        for turn in range(blocks + 1):
            for arena in arenas:
                block = arena.measure(steps)
                if turn > 0:
                    arena.blocks.append(block)
        reports = [_report(arena, arenas[0]) for arena in arenas]
        if with_tls:
            plain, by_tls = (arena.medians("both_s") for arena in arenas[-2:])
            reports[-1]["tls_ratio"] = ratios(by_tls, plain)
        return reports


def _report(arena: Arena, reference: Arena) -> dict[str, Any]:
    is_compared = reference.contender is REFERENCE
    return {
        "contender": arena.contender.name,
        "calls": {call: _call_report(arena, reference if is_compared else None, call) for call in CALLS},
        "daemons_cpu_s": spread(arena.cpu_s()),
        "daemons_cpu_ratio": ratios(arena.cpu_s(), reference.cpu_s()) if is_compared else None,
        "ranks_cpu_s": spread([block.ranks_cpu_s for block in arena.blocks]),
        "round_trips": max(block.round_trips for block in arena.blocks),
        "lighthouse_calls": max(block.lighthouse_calls for block in arena.blocks),
        "memory_mb": [daemon.child.memory_mb() for daemon in arena.daemons],
    }


def _call_report(arena: Arena, reference: Arena | None, call: str) -> dict[str, Any]:
    """The median is of all calls, its spread that of the blocks' medians."""
    every = [value for block in arena.blocks for value in getattr(block, call)]
    return {
        "median_s": spread(every).median,
        "median_of_blocks_s": spread(arena.medians(call)),
        "p99_s": percentile(every, 0.99),
        "ratio": ratios(arena.medians(call), reference.medians(call)) if reference else None,
        "calls": len(every),
    }


def render(results: Sequence[Mapping[str, Any]]) -> str:
    times = ["quorum ms (p99)", "commit ms (p99)", "both ms (p99)"]
    cpu = ["daemons' CPU ms", "CPU, of torchft's"]
    header = ["daemons, client", *times, "both, of torchft's", *cpu, "round trips", "lighthouse calls"]
    shown = table(header, [_cells(row) for row in results])
    told = [
        f"with TLS both calls take {row['tls_ratio'].text()} of the time without"
        for row in results
        if "tls_ratio" in row
    ]
    return "\n".join([shown, *told])


def _cells(row: Mapping[str, Any]) -> list[str]:
    calls = [row["calls"][call] for call in CALLS]
    times = [f"{call['median_s'] * 1e3:.2f} ({call['p99_s'] * 1e3:.2f})" for call in calls]
    cpu = [row["daemons_cpu_s"].text(2, 1e3), _ratio(row, row["daemons_cpu_ratio"])]
    calls_made = f"{row['lighthouse_calls']:.2f}" if row["contender"] in _COUNTED else "-"
    trips = [f"{row['round_trips']:.2f}", calls_made]
    return [row["contender"], *times, _ratio(row, row["calls"]["both_s"]["ratio"]), *cpu, *trips]


def bars(results: Sequence[Mapping[str, Any]]) -> list[Bar]:
    standing = next(row for row in results if row["contender"] == OWN_CLIENT.name)
    found = [
        Bar("standing: round trips a step", standing["round_trips"], 1),
        Bar("standing: lighthouse calls a step", standing["lighthouse_calls"], 0),
    ]
    found += [
        Bar("standing: both calls with TLS, of those without", row["tls_ratio"].median, TLS_BAR)
        for row in results
        if "tls_ratio" in row
    ]
    if (ratio := standing["calls"]["both_s"]["ratio"]) is not None:
        found.append(Bar("standing: both calls, of torchft's", ratio.median, 0.5))
    return found


def _ratio(row: Mapping[str, Any], ratio: Any) -> str:
    if ratio is None:
        return "-"
    return "1" if row["contender"] == REFERENCE.name else ratio.text()


@click.command()
@click.option("--blocks", type=click.IntRange(1), default=15, show_default=True, help="Measured blocks each.")
@click.option("--steps", type=click.IntRange(2), default=100, show_default=True, help="Steps of a block.")
@click.option("--quick", is_flag=True, help="Seconds instead of a minute: two blocks of 30 steps.")
@click.option("--tls", "with_tls", is_flag=True, help="Also with TLS, in turn with the others, and the ratio.")
@check_option
@json_option
def main(blocks: int, steps: int, quick: bool, with_tls: bool, check: bool, path: Path | None) -> None:
    """What Quorum and ShouldCommit cost per step, beside torchft's."""
    if quick:
        blocks, steps = 2, 30
    found = show_machine(beside_torchft=True)
    results = run_all(blocks, steps, with_tls=with_tls)
    click.echo(render(results))
    settings = {"groups": GROUPS, "blocks": blocks, "steps_per_block": steps}
    write_json(path, {"benchmark": "step_overhead", "machine": found, **settings, "contenders": results})
    conclude(bars(results), is_checked=check)


if __name__ == "__main__":
    main()
