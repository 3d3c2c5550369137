"""python -m tests.simulation.museum [NAME...]: how many seeds each planted defect survives, as a table for docs."""

import argparse
import logging
import statistics
import sys

from tests.simulation.museum.catalogue import EXHIBITS
from tests.simulation.museum.exhibit import Exhibit

ROUNDS = 10
SEEDS_PER_ROUND = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.museum", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these exhibits; else all")
    names = parser.parse_args().names
    logging.disable()
    print(f"| planted defect | found by | seeds until found: median of {ROUNDS} rounds | most |")
    print("| --- | --- | --- | --- |")
    missed = 0
    for exhibit in EXHIBITS:
        if names and exhibit.name not in names:
            continue
        counts = [seeds_until_found(exhibit, SEEDS_PER_ROUND * number) for number in range(ROUNDS)]
        missed += max(counts) > SEEDS_PER_ROUND
        print(f"| {exhibit.defect} | {exhibit.rule} | {statistics.median(counts):g} | {max(counts)} |", flush=True)
    return 1 if missed else 0


def seeds_until_found(exhibit: Exhibit, first: int) -> int:
    """SEEDS_PER_ROUND + 1, if none of the round finds it."""
    with exhibit.planted():
        seeds = range(first, first + SEEDS_PER_ROUND)
        return next((seed - first + 1 for seed in seeds if exhibit.is_found(seed)), SEEDS_PER_ROUND + 1)


if __name__ == "__main__":
    sys.exit(main())
