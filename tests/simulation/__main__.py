"""python -m tests.simulation --seeds 0:1000 [--jobs 2] [--first]; --seed N --trace replays one as text."""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.quorums.plan import SCENARIOS
from tests.simulation.quorums.simulation import run_seed
from tests.simulation.world import Result

REPORT_EVERY = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FROM:TO")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true", help="print what happens, with --seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=75.0, help="simulated time per seed, about")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--scenario", choices=SCENARIOS, help="this one; else drawn from the seed")
    parser.add_argument("--groups", type=int, help="so many; else drawn from the seed")
    parser.add_argument("--min-step", type=float, default=0.0, help="the shortest step that is drawn, in seconds")
    options = parser.parse_args()
    logging.disable()  # a trace says more
    run = partial(
        run_seed,
        seconds=options.seconds,
        scenario=options.scenario,
        groups=options.groups,
        min_step_s=options.min_step,
    )
    if options.seed is not None:
        result = run(options.seed, trace=print if options.trace else None)
        print(result.violation or "clean", dict(result.counts))
        return 1 if result.violation else 0
    first, last = (int(text) for text in options.seeds.split(":"))
    results = run_all(partial(guarded, run), range(first, last), options.jobs)
    replay = f"python -m tests.simulation --seconds {options.seconds:g} --trace --seed"
    return report(_up_to_first(results) if options.first else results, replay)


def guarded(run: Callable[[int], Result], seed: int) -> Result:
    """A defect that shows as an exception of a machine is one more way to fail."""
    try:
        return run(seed)
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Result(
            seed, violation=f"{type(error).__name__}: {error} ({where.filename.split('/')[-1]}:{where.lineno})"
        )


def run_all(run: Callable[[int], Result], seeds: range, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=logging.disable) as pool:
        yield from pool.map(run, seeds, chunksize=4)


def _up_to_first(results: Iterator[Result]) -> Iterator[Result]:
    for result in results:
        yield result
        if result.violation:
            return


def report(results: Iterator[Result], replay: str) -> int:
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
