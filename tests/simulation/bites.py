"""Measure how many mutants drawn faults find: `python -m tests.simulation.bites --sample 60 --seeds 0:100`.

Each mutant is planted in a process of its own, which runs seeds until one fails. Unlike planted.py, this changes no plan.
"""

import argparse
import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from itertools import cycle
from pathlib import Path
from types import CodeType
from typing import Any

from tests.mutants.catalogue import ROOT, Mutant, load

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
    parser.add_argument("--plant", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    first, last = map(int, given.seeds.split(":"))
    scenarios = given.scenarios.split(",") if given.scenarios else [""]
    mutants = {mutant.name: mutant for mutant in load()}
    if given.plant:
        print(json.dumps(_find(mutants[given.plant], range(first, last), scenarios)))
        return
    known = {}
    if given.results and given.results.exists():
        known = {row["name"]: row for row in map(json.loads, given.results.read_text().splitlines())}
    names = given.names or sample(given.sample, given.draw)
    for name in names:
        if known.get(name, {}).get("seed") is not None or known.get(name, {}).get("tried", 0) >= last:
            continue
        options = ["--plant", name, "--seeds", given.seeds, "--scenarios", given.scenarios]
        child = [sys.executable, "-m", "tests.simulation.bites", *options]
        done = subprocess.run(child, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        row = json.loads(done.stdout) if done.returncode == 0 else {"name": name, "error": done.stderr[-300:]}
        known[name] = row
        print(json.dumps(row), flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [known[name] for name in names]
    found = sum(row.get("seed") is not None for row in rows)
    cpu_s = sum(row.get("cpu_s", 0.0) for row in rows)
    print(f"{found} of {len(rows)} found ({found / len(rows):.0%}), {cpu_s:.0f} s of CPU time")


def is_rule(mutant: Mutant) -> bool:
    return mutant.module.startswith((*OF_RUNS, *OF_QUORUMS, *RULES))


def sample(count: int, draw: int) -> list[str]:
    """Return names of mutants of rules."""
    names = sorted(mutant.name for mutant in load() if is_rule(mutant))
    return random.Random(f"bites {draw}").sample(names, count)


def plant(mutant: Mutant) -> None:
    """Let this process import the mutant's modules with its changes."""
    changed = {str(ROOT / module): source for module, source in mutant.sources().items()}
    get_code = SourceFileLoader.get_code

    def get_planted_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        source = changed.pop(str(loader.path), None)
        return get_code(loader, fullname) if source is None else compile(source, str(loader.path), "exec")

    SourceFileLoader.get_code = get_planted_code  # type: ignore[method-assign]


def _find(mutant: Mutant, seeds: range, scenarios: Sequence[str]) -> dict[str, Any]:
    """Run seeds until one fails."""
    plant(mutant)
    from tests.simulation.simulators import run_guarded

    logging.disable()
    simulator = "runs" if mutant.module in OF_RUNS else "quorums"
    row: dict[str, Any] = {"name": mutant.name, "module": mutant.module, "tried": seeds.start, "seed": None}
    began_at = time.process_time()
    for seed, scenario in zip(seeds, cycle(scenarios), strict=False):
        signal.signal(signal.SIGVTALRM, _give_up)
        signal.setitimer(signal.ITIMER_VIRTUAL, SEED_CPU_S)
        options = {"scenario": scenario} if scenario and simulator == "quorums" else {}
        result = run_guarded(simulator, seed, **options)
        row["tried"] = seed + 1
        if result.violation:
            row |= {"seed": seed, "scenario": scenario, "violation": result.violation[:200]}
            break
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {**row, "cpu_s": round(time.process_time() - began_at, 1)}


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"the seed takes more than {SEED_CPU_S:.0f} s of CPU time")


if __name__ == "__main__":
    main()
