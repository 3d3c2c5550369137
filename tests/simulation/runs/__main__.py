"""python -m tests.simulation.runs --seeds 0:1000 [--jobs 2]; --seed N --trace replays one as text."""

import argparse
import logging
import sys
from functools import partial

from tests.simulation.__main__ import guarded, report, run_all
from tests.simulation.runs.plan import SCENARIOS
from tests.simulation.runs.simulation import run_seed


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
    results = run_all(partial(guarded, partial(run_seed, scenario=options.scenario)), range(first, last), options.jobs)
    return report(results, "python -m tests.simulation.runs --trace --seed")


if __name__ == "__main__":
    sys.exit(main())
