"""What marks cost the thread that trains, while another thread takes a sample twice a second.

CPU time of that thread, so that what else the machine does counts less. An empty call and a read of the clock are
measured beside them: they tell how fast this machine is at the moment.

A mark is only noted; what the notes amount to is reckoned by the thread that takes samples, and between the blocks
here. That is measured, too, for each mark of a phase with a tick: it takes the interpreter from the thread that trains.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from agent_client.progress.progress import Progress
from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.figures import Spread, json_option, show_machine, spread, table, write_json

SAMPLED_EVERY_S = 0.5
CALLS = 1000
LIMIT_US = 2.0
MARKED = "phase, one tick in it"
MARKS = 3
RECKONED = "a mark reckoned (the sampler's thread)"


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    us: Spread


def marks(progress: Progress) -> dict[str, Callable[[], object]]:
    def phase() -> None:
        with progress.phase("validation", total=25):
            progress.tick()

    def wait() -> None:
        with progress.waiting_for("rank 0 validation"):
            pass

    def nothing() -> None:
        pass

    return {
        MARKED: phase,
        "tick": progress.tick,
        "waiting_for": wait,
        "step": lambda: progress.step(1),
        "sample (its own thread)": progress.sample,
        "an empty call": nothing,
        "time.monotonic": time.monotonic,
    }


def measure(blocks: int) -> list[Cost]:
    """Every kind of mark in turn, `blocks` times, after one turn that is not counted."""
    progress = Progress()
    kinds = marks(progress)
    times: dict[str, list[float]] = {what: [] for what in (*kinds, RECKONED)}
    has_ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(progress, has_ended), daemon=True)
    sampler.start()
    try:
        with progress.phase("epoch", total=625):
            for turn in range(blocks + 1):
                for what, act in kinds.items():
                    progress.sample()
                    cost_us = _block(act) * 1e6
                    if turn > 0:
                        times[what].append(cost_us)
            times[RECKONED] = [_reckoning() * 1e6 for _ in range(blocks)]
    finally:
        has_ended.set()
        sampler.join()
    return [Cost(what, spread(found)) for what, found in times.items()]


def _reckoning() -> float:
    progress = Progress()
    _block(marks(progress)[MARKED])
    began_at = time.thread_time()
    progress.sample()
    return (time.thread_time() - began_at) / (MARKS * CALLS)


def _sample(progress: Progress, has_ended: threading.Event) -> None:
    while not has_ended.wait(SAMPLED_EVERY_S):
        progress.sample()


def _block(act: Callable[[], object]) -> float:
    began_at = time.thread_time()
    for _ in range(CALLS):
        act()
    return (time.thread_time() - began_at) / CALLS


def render(costs: Sequence[Cost]) -> str:
    rows = [[cost.what, cost.us.text(3)] for cost in costs]
    return table(["mark", "µs, median (least to most)"], rows)


def bars(costs: Sequence[Cost]) -> list[Bar]:
    return [Bar(cost.what, cost.us.median, LIMIT_US, "µs") for cost in costs if cost.what == MARKED]


@click.command()
@click.option("--blocks", type=click.IntRange(1), default=300, show_default=True, help="Blocks of 1,000 calls each.")
@click.option("--quick", is_flag=True, help="A second instead of thirty: 10 blocks.")
@check_option
@json_option
def main(blocks: int, quick: bool, check: bool, path: Path | None) -> None:
    """What a rank's marks of where it is cost the thread that trains."""
    found = show_machine()
    costs = measure(10 if quick else blocks)
    click.echo(render(costs))
    write_json(path, {"benchmark": "phase_cost", "machine": found, "calls": CALLS, "costs": costs})
    conclude(bars(costs), is_checked=check)


if __name__ == "__main__":
    main()
