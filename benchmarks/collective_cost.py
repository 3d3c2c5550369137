"""What it costs a script without an Agent that its collectives are seen (agent_client.observe).

Blocks of all_reduces over a gloo group of one rank, in turn with a sample twice a second on another thread and without.
CPU time of the thread that asks for them, so that what else the machine does counts less. Beside them, what the other
thread takes: a sample, and looking up which collective goes on, which it does where nothing has moved for two seconds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import click
import torch
import torch.distributed as dist

from agent_client.manager_client.watch import SAMPLED_EVERY_S
from agent_client.progress.progress import ScriptProgress
from agent_client.progress.script_groups import newest_going_on, read_recorders
from benchmarks.support.bars import Bar, check_option, conclude
from benchmarks.support.figures import Spread, json_option, show_machine, spread, table, write_json

CALLS = 1000
SAMPLES = 100
LIMIT_US = 2.0
UNSEEN, SEEN = "all_reduce", "all_reduce, observed"


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    us: Spread


def measure(blocks: int) -> list[Cost]:
    """Both kinds in turn, `blocks` times, after one turn that is not counted."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor, progress = torch.ones(16), ScriptProgress()
        times: dict[str, list[float]] = {UNSEEN: [], SEEN: []}
        for turn in range(blocks + 1):
            for what, found in times.items():
                took_us = _block(lambda: dist.all_reduce(tensor), progress.sample if what == SEEN else object)
                if turn > 0:
                    found.append(took_us)
        beside = {
            "a sample (its own thread)": progress.sample,
            "what goes on, looked up (its own thread)": lambda: newest_going_on(read_recorders(with_entries=True)),
        }
        for what, act in beside.items():
            times[what] = [_timed(act, 1) for _ in range(SAMPLES if act == progress.sample else blocks)]
    finally:
        dist.destroy_process_group()
    return [Cost(what, spread(found)) for what, found in times.items()]


def _block(act: Callable[[], object], sample: Callable[[], object]) -> float:
    """Beside a thread that samples, or only wakes up."""
    has_ended = Event()
    sampler = Thread(target=_sample, args=(sample, has_ended), daemon=True)
    sampler.start()
    try:
        return _timed(act, CALLS)
    finally:
        has_ended.set()
        sampler.join()


def _sample(sample: Callable[[], object], has_ended: Event) -> None:
    sample()
    while not has_ended.wait(SAMPLED_EVERY_S):
        sample()


def _timed(act: Callable[[], object], calls: int) -> float:
    began_at = time.thread_time()
    for _ in range(calls):
        act()
    return (time.thread_time() - began_at) / calls * 1e6


def bars(costs: Sequence[Cost]) -> list[Bar]:
    """By the fastest blocks: what others take beyond is of this machine at that moment."""
    us = {cost.what: cost.us.low for cost in costs}
    return [Bar("what a collective costs more where it is observed", us[SEEN] - us[UNSEEN], LIMIT_US, "µs")]


@click.command()
@click.option("--blocks", type=click.IntRange(1), default=60, show_default=True, help="Blocks of 1,000 calls each.")
@click.option("--quick", is_flag=True, help="A few seconds: 10 blocks.")
@check_option
@json_option
def main(blocks: int, quick: bool, check: bool, path: Path | None) -> None:
    """What a script pays for it that its collectives are seen."""
    found = show_machine()
    costs = measure(10 if quick else blocks)
    click.echo(table(["what", "µs, median (least to most)"], [[cost.what, cost.us.text(3)] for cost in costs]))
    write_json(path, {"benchmark": "collective_cost", "machine": found, "calls": CALLS, "costs": costs})
    conclude(bars(costs), is_checked=check)


if __name__ == "__main__":
    main()
