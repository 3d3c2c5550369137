"""Run seeds, replay one as text, or compare the messages of each seed with the frozen digests.

python -m tests.simulation --seeds 0:1000 --jobs 2 [--first]
python -m tests.simulation quorums --seed 452 --trace
python -m tests.simulation --seeds 0:2000 --jobs 2 --compare
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tests.simulation import frozen
from tests.simulation.simulators import SIMULATORS, run_guarded, run_seed
from tests.simulation.world import Result

REPORT_EVERY = 100
MAX_SHOWN = 20
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("simulator", nargs="?", choices=SIMULATORS, help="default: all")
    parser.add_argument("--seeds", default="0:100", help="FROM:TO (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="run one seed and print its counts")
    parser.add_argument("--trace", action="store_true", help="with --seed, print what happens")
    parser.add_argument("--messages", action="store_true", help="with --seed, print what is sent")
    parser.add_argument("--compare", action="store_true", help="compare messages with the frozen digests")
    parser.add_argument("--freeze", action="store_true", help="freeze the messages of --seeds, after those before FROM")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--scenario", help="use this scenario instead of one drawn from the seed")
    parser.add_argument("--seconds", type=float, help="simulated time of a seed of quorums (default: 75)")
    parser.add_argument("--groups", type=int, help="number of groups of quorums, instead of a drawn one")
    parser.add_argument("--min-step", dest="min_step_s", type=float, help="shortest step of quorums, in seconds")
    given = parser.parse_args()
    logging.disable()  # the product's logs; a trace says more
    names = [given.simulator] if given.simulator else list(SIMULATORS)
    plan = {key: value for key in ("scenario", "seconds", "groups", "min_step_s") if (value := getattr(given, key))}
    if given.seed is not None:
        return max([_show(name, given.seed, plan, given.trace, given.messages) for name in names])
    first, last = (int(text) for text in given.seeds.split(":"))
    seeds = range(first, last)
    if given.compare or given.freeze:
        return max([_compare(name, seeds, given.jobs, freezes=given.freeze) for name in names])
    return max([_run(name, seeds, given.jobs, plan, stops=given.first) for name in names])


def in_parallel(act: Callable[[int], T], seeds: range, jobs: int) -> Iterator[T]:
    if jobs == 1:
        yield from map(act, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=logging.disable) as pool:
        yield from pool.map(act, seeds, chunksize=4)


def _show(name: str, seed: int, plan: dict[str, Any], is_traced: bool, has_messages: bool) -> int:
    if has_messages:
        for who, to, message in frozen.messages(name, seed)[0]:
            print(f"{who} -> {to}: {message}")
        return 0
    result = run_seed(name, seed, trace=print if is_traced else None, **plan)
    print(result.violation or "clean", dict(result.counts))
    return 1 if result.violation else 0


def _compare(name: str, seeds: range, jobs: int, *, freezes: bool) -> int:
    recorded = list(in_parallel(partial(frozen.record, name), seeds, jobs))
    found = [each.digest for each in recorded]
    if failed := [each.result for each in recorded if each.result.violation]:
        print(f"{name}: {len(failed)} seeds fail. The first is seed {failed[0].seed}: {failed[0].violation}")
        return 1
    if freezes:
        frozen.save(name, [*frozen.load(name)[: seeds.start], *found])
        return 0
    expected = frozen.load(name)[seeds.start : seeds.stop]
    wrong = [seed for seed, one, other in zip(seeds, expected, found, strict=True) if one != other]
    print(f"{name}: {len(found)} seeds, {len(wrong)} differ{': ' * bool(wrong)}{' '.join(map(str, wrong[:MAX_SHOWN]))}")
    return 1 if wrong else 0


def _run(name: str, seeds: range, jobs: int, plan: dict[str, Any], *, stops: bool) -> int:
    results = in_parallel(partial(run_guarded, name, **plan), seeds, jobs)
    options = "".join(f" --{key.removesuffix('_s').replace('_', '-')} {value}" for key, value in plan.items())
    return report(
        _up_to_first(results) if stops else results, f"python -m tests.simulation {name}{options} --trace --seed"
    )


def _up_to_first(results: Iterable[Result]) -> Iterator[Result]:
    for result in results:
        yield result
        if result.violation:
            return


def report(results: Iterable[Result], replay: str) -> int:
    """Print each failure with the command that replays it, then the sums of all counts."""
    started_at = time.monotonic()
    counts: Counter[str] = Counter()
    done = failed = 0
    for result in results:
        done += 1
        counts += result.counts
        counts["events"] += result.events
        counts["simulated s"] += int(result.simulated_s)
        if result.violation:
            failed += 1
            print(f"seed {result.seed}: {result.violation[:1200]}")
            print(f"    {replay} {result.seed}", flush=True)
        if done % REPORT_EVERY == 0:
            print(f"-- {done} seeds, {failed} failed, {time.monotonic() - started_at:.0f} s", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:12,d}  {name}")
    print(f"{done} seeds, {failed} failed, {time.monotonic() - started_at:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
