"""Measure how many mutants drawn faults find: `python -m tests.simulation.bites --sample 60 --seeds 0:100`.

Each mutant is planted in a process of its own, which runs seeds until one fails. No plan is changed. For a mutant that
is not found, the first seed whose messages differ from the frozen ones tells whether the seeds reach its code at all.
The scenario `model` stands for the runs of tests/model, of which the model has to allow each message.
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
from typing import Any, NamedTuple

from tests.model.conformance import check_trace
from tests.model.simulated import trace_of
from tests.mutants.catalogue import Mutant, load
from tests.simulation import frozen
from tests.simulation.planted import planted
from tests.simulation.simulators import SIMULATORS, run_guarded

OF_RUNS = ("lighthouse/job/generations.py", "lighthouse/job/restarts.py")
OF_QUORUMS = tuple(
    f"lighthouse/job/{name}.py"
    for name in ("driver", "forming", "lineage", "presence", "records", "registry", "roster", "standing")
)
OF_MANAGERS = ("manager/group/", "lighthouse_protocol/rules/quorum_change.py")
NOT_SIMULATED = ("manager/group/link.py",)
MODEL = "model"
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
    if unknown := set(scenarios) - {
        "",
        MODEL,
        *(name for simulator in SIMULATORS.values() for name in simulator.scenarios),
    }:
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
    return mutant.module.startswith((*OF_RUNS, *OF_QUORUMS, *OF_MANAGERS)) and mutant.module not in NOT_SIMULATED


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
            signal.setitimer(signal.ITIMER_VIRTUAL, SEED_CPU_S)
            is_compared = row["differs"] is None and seed < len(digests)
            tried = run(simulator, seed, scenarios[seed % len(scenarios)], digests[seed] if is_compared else None)
            row["tried"] = seed + 1
            if tried.differs:
                row["differs"] = seed
            if tried.violation:
                row |= {"seed": seed, "scenario": tried.scenario, "violation": tried.violation[:200]}
                break
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {**row, "cpu_s": round(time.process_time() - began_at, 1)}


class Tried(NamedTuple):
    scenario: str
    violation: str
    differs: bool


def run(simulator: str, seed: int, scenario: str, digest: str | None) -> Tried:
    """Run a seed. Compare its messages with `digest` if the scenario is the drawn one."""
    if scenario == MODEL and simulator == "quorums":
        return Tried(MODEL, refusal(seed), differs=False)
    options = {"scenario": scenario} if scenario in SIMULATORS[simulator].scenarios else {}
    used = SIMULATORS[simulator].draw_plan(seed, **options).scenario
    if options or digest is None:
        return Tried(used, run_guarded(simulator, seed, **options).violation, differs=False)
    result, found = frozen.record(simulator, seed)
    return Tried(used, result.violation, found != digest)


def refusal(seed: int) -> str:
    """Return why a checker or the model refuses a run, or "" if they do not."""
    try:
        check_trace(trace_of(seed))
    except Exception as error:  # noqa: BLE001  what the mutant made of it
        return f"{type(error).__name__}: {error}"
    return ""


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"the seed takes more than {SEED_CPU_S:.0f} s of CPU time")


if __name__ == "__main__":
    main()
