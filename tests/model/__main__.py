"""python -m tests.model [--slow] [--defects]; --defect NAME prints a counterexample; --traces 0:50 checks traces."""

import argparse
import logging
import sys
import time
from collections import Counter

from tests.model.bounds import QUICK, SLOW, check, report
from tests.model.conformance import NotAllowed, check_trace
from tests.model.defects import DEFECTS
from tests.model.simulated import trace_of


def explore_all(*, is_slow: bool) -> int:
    checked: Counter[str] = Counter()
    total = [0, 0, 0.0]
    print(f"{'bounds':<64}{'states':>9}{'transitions':>13}{'depth':>7}{'seconds':>9}")
    for bounds in SLOW if is_slow else QUICK:
        found, model = check(bounds)
        print(f"{bounds!s:<64}{found.states:9,}{found.transitions:13,}{found.depth:7}{found.seconds:9.1f}", flush=True)
        if found.violation:
            print(report(found))
            return 1
        checked += model.checked
        checked.update({goal.split()[0]: count for goal, count in found.waiting.items()})
        total = [total[0] + found.states, total[1] + found.transitions, total[2] + found.seconds]
    print(f"{'all':<64}{total[0]:9,}{total[1]:13,}{'':7}{total[2]:9.1f}")
    print("\nhow often each promise was checked; for L1 and L2, the states in which the goal is not reached yet:")
    print("  ".join(f"{name} {count:,}" for name, count in sorted(checked.items(), key=lambda item: _order(item[0]))))
    return 0


def _order(promise: str) -> tuple[bool, int]:
    return promise.startswith("L"), int(promise[1:])


def plant_all() -> int:
    missed = 0
    for defect in DEFECTS:
        found, _ = check(defect.bounds, defect.weak.split(), [defect.promise])
        is_found = found.violation.startswith(f"{defect.promise} ")
        missed += not is_found
        what = f"found after {found.states:,} states, in {len(found.trace)} actions" if is_found else "NOT FOUND"
        print(f"{defect.promise:<4} {defect.weak:<28} {what}")
    print(f"{len(DEFECTS)} planted, {missed} not found")
    return 1 if missed else 0


def show(name: str) -> int:
    for defect in DEFECTS:
        if name in defect.weak.split():
            found, _ = check(defect.bounds, defect.weak.split(), [defect.promise])
            print(report(found))
            return 0
    print(f"no such defect; there are {', '.join(defect.weak for defect in DEFECTS)}")
    return 2


def check_traces(first: int, last: int) -> int:
    actions: Counter[str] = Counter()
    messages = refused = 0
    began_at = time.process_time()
    for seed in range(first, last):
        trace = trace_of(seed)
        messages += len(trace)
        try:
            actions.update(check_trace(trace).actions)
        except NotAllowed as error:
            refused += 1
            print(f"seed {seed}: {error}")
    print("  ".join(f"{name} {count:,}" for name, count in actions.most_common()))
    seconds = time.process_time() - began_at
    print(f"{last - first} traces, {messages:,} messages, {refused} refused, {seconds:.1f} s")
    return 1 if refused else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--slow", action="store_true", help="two faults or three groups; minutes")
    parser.add_argument("--defects", action="store_true", help="plant each defect, which has to be found")
    parser.add_argument("--defect", metavar="NAME", help="plant this one, and print the counterexample")
    parser.add_argument("--traces", metavar="FROM:TO", help="check simulated runs of these seeds")
    options = parser.parse_args()
    logging.disable()
    if options.defects:
        return plant_all()
    if options.defect:
        return show(options.defect)
    if options.traces:
        first, last = map(int, options.traces.split(":"))
        return check_traces(first, last)
    return explore_all(is_slow=options.slow)


if __name__ == "__main__":
    sys.exit(main())
