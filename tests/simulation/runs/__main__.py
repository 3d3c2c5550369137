"""python -m tests.simulation.runs --seeds 0:1000 [--jobs 2]; --seed N --trace replays one as text."""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.runs.plan import SCENARIOS
from tests.simulation.runs.simulation import Result, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.runs", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FROM:TO")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true", help="print what happens, with --seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--scenario", choices=SCENARIOS, help="this one; else drawn from the seed")
    options = parser.parse_args()
    logging.disable()  # the drivers are the product's
    if options.seed is not None:
        result = run_seed(options.seed, scenario=options.scenario, trace=print if options.trace else None)
        print(result.violation or "clean", dict(result.counts))
        return 1 if result.violation else 0
    first, last = (int(text) for text in options.seeds.split(":"))
    return report(_results(partial(guarded, scenario=options.scenario), range(first, last), options.jobs))


def guarded(seed: int, scenario: str | None = None) -> Result:
    """A defect that shows as an exception of a machine is one more way to fail."""
    try:
        return run_seed(seed, scenario=scenario)
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = where.filename.split("/")[-1]
        return Result(seed, violation=f"{type(error).__name__}: {error} ({name}:{where.lineno})")


def _results(run: "partial[Result]", seeds: range, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=8)


def report(results: Iterator[Result]) -> int:
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
            print(f"    python -m tests.simulation.runs --seed {result.seed} --trace", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:12,d}  {name}")
    print(f"{done} seeds, {failed} failed, {time.monotonic() - started_at:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
