"""Measure how many mutants drawn faults find: `python -m tests.simulation.bites --sample 60 --seeds 0:100`.

Each mutant is planted in a process of its own, which runs seeds until one fails. No plan is changed. For a mutant that
is not found, the first seed whose messages differ from the frozen ones tells whether the seeds reach its code at all.
"""

import argparse
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.catalogue import Mutant, load
from tests.simulation import frozen
from tests.simulation.planted import planted
from tests.simulation.simulators import SIMULATORS, run_guarded

OF_RUNS = ("lighthouse/job/generations.py", "lighthouse/job/restarts.py")
OF_QUORUMS = tuple(
    f"lighthouse/job/{name}.py"
    for name in ("driver", "forming", "lineage", "presence", "records", "registry", "roster", "standing")
)
RULES = ("manager/group/", "lighthouse_protocol/rules/heal.py", "lighthouse_protocol/rules/quorum_change.py")
SEED_CPU_S = 60.0
"""A seed that takes more CPU time than this does not end."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.bites", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants; default: a sample of those of rules")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants to draw")
    parser.add_argument("--draw", type=int, default=0, help="number that determines the sample")
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO")
    parser.add_argument("--scenarios", default="", help="comma-separated: seeds use them in turn; default: as drawn")
    parser.add_argument("--results", type=Path, help="file of outcomes: mutants that it has as found are not run again")
    given = parser.parse_args(arguments)
    logging.disable()
    first, last = map(int, given.seeds.split(":"))
    mutants = {mutant.name: mutant for mutant in load()}
    known: dict[str, Any] = {}
    if given.results and given.results.exists():
        known = {row["name"]: row for row in map(json.loads, given.results.read_text().splitlines())}
    names = given.names or sample(given.sample, given.draw)
    scenarios = given.scenarios.split(",")
    if unknown := set(scenarios) - {"", *(name for simulator in SIMULATORS.values() for name in simulator.scenarios)}:
        parser.error(f"--scenarios: unknown: {', '.join(sorted(unknown))}")
    for name in names:
        before = known.get(name, {"tried": first, "seed": None, "differs": None, "cpu_s": 0.0})
        if before["seed"] is not None or before["tried"] >= last:
            continue
        seeds = range(before["tried"], last)
        row = in_a_fork(lambda: find(mutants[name], seeds, scenarios, before["differs"]))  # noqa: B023
        row["cpu_s"] = round(row["cpu_s"] + before["cpu_s"], 1)
        known[name] = row
        print(json.dumps(row), flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [known[name] for name in names]
    found = sum(row["seed"] is not None for row in rows)
    reached = sum(row["seed"] is None and row["differs"] is not None for row in rows)
    cpu_s = sum(row["cpu_s"] for row in rows)
    print(
        f"{found} of {len(rows)} found ({found / len(rows):.0%}), {reached} only changed messages, "
        f"{len(rows) - found - reached} changed nothing, {cpu_s:.0f} s of CPU time"
    )


def is_rule(mutant: Mutant) -> bool:
    return mutant.module.startswith((*OF_RUNS, *OF_QUORUMS, *RULES))


def sample(count: int, draw: int) -> list[str]:
    """Return names of mutants of rules. A mutant that joins the catalogue replaces at most one of the others."""
    names = (mutant.name for mutant in load() if is_rule(mutant))
    return sorted(names, key=lambda name: random.Random(f"bites {draw} {name}").random())[:count]


def in_a_fork(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `act` returns in a child of this process, which a mutant may leave in any state."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writes, "w") as pipe:
            pipe.write(json.dumps(act()))
            pipe.flush()
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def find(mutant: Mutant, seeds: range, scenarios: Sequence[str], differs: int | None) -> dict[str, Any]:
    """Run seeds until one fails. `differs` is the first seed whose messages are not the frozen ones."""
    simulator = "runs" if mutant.module in OF_RUNS else "quorums"
    digests = frozen.load(simulator)
    row: dict[str, Any] = {"name": mutant.name, "module": mutant.module, "tried": seeds.start, "seed": None}
    row["differs"] = differs
    began_at = time.process_time()
    signal.signal(signal.SIGVTALRM, _give_up)
    with planted(mutant):
        for seed in seeds:
            scenario = scenarios[seed % len(scenarios)]
            signal.setitimer(signal.ITIMER_VIRTUAL, SEED_CPU_S)
            options = {"scenario": scenario} if scenario in SIMULATORS[simulator].scenarios else {}
            if options or row["differs"] is not None or seed >= len(digests):
                result = run_guarded(simulator, seed, **options)
            else:
                result, digest = frozen.record(simulator, seed)
                if digest != digests[seed]:
                    row["differs"] = seed
            row["tried"] = seed + 1
            if result.violation:
                used = SIMULATORS[simulator].draw_plan(seed, **options).scenario
                row |= {"seed": seed, "scenario": used, "violation": result.violation[:200]}
                break
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {**row, "cpu_s": round(time.process_time() - began_at, 1)}


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"the seed takes more than {SEED_CPU_S:.0f} s of CPU time")


if __name__ == "__main__":
    main()
