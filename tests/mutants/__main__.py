"""Plant each mutant in a copy of the project and run its tests: `python -m tests.mutants [NAME ...]`."""

import argparse
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import ROOT, Mutant, load

COPIED = (
    "lighthouse", "manager", "agent_client", "protos", "lighthouse_protocol", "lighthouse_runtime",
    "tests", "examples", "benchmarks", "deploy", "docs", "pyproject.toml", "README.md",
)  # fmt: skip
TIMEOUT_S = 600.0
TEST_TIMEOUT = "--timeout=120"  # pytest-timeout ends the process
FAILED = 1  # pytest: tests ran, and some failed
NO_DEFECT = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "UnboundLocalError")

_moments = itertools.count(1_000_000_000)  # bytecode is valid for one modification time


@dataclass(frozen=True, slots=True)
class Outcome:
    """`found_by`: the test that failed first; empty: none did. `error`: the mutant is not valid."""

    mutant: Mutant
    found_by: str = ""
    error: str = ""
    took_s: float = 0.0

    def __str__(self) -> str:
        invalid = f"INVALID: {self.error}" if self.error else ""
        verdict = invalid or (f"found by {self.found_by}" if self.found_by else "SURVIVED")
        return f"{self.mutant.module} {self.mutant.name}: {verdict} ({self.took_s:.0f} s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if at least `--bar` of the mutants are found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants, or parts of their modules' paths; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the project to test at once")
    parser.add_argument("--bar", type=float, default=0.95, help="share that must be found")
    parser.add_argument("--table", action="store_true", help="print the table of contributing/testing.md at the end")
    parser.add_argument("--results", type=Path, help="file of all outcomes; they count, too")
    parser.add_argument("--missing", action="store_true", help="try only mutants of which --results has no outcome")
    options = parser.parse_args(arguments)
    listed = load()
    named = [m for m in listed if not options.names or any(n == m.name or n in m.module for n in options.names)]
    kept = read(options.results, listed) if options.results else {}
    if options.missing:
        named = [mutant for mutant in named if mutant.name not in kept]
    known = {
        **kept,
        **{outcome.mutant.name: outcome for outcome in run(named, options.jobs, options.results)},
    }
    outcomes = [known[mutant.name] for mutant in listed if mutant.name in known]
    if options.table:
        print(*table(outcomes), sep="\n")
    found = sum(bool(outcome.found_by) for outcome in outcomes)
    print(f"{found} of {len(outcomes)} mutants found; {len(listed) - len(outcomes)} more are listed")
    return 0 if outcomes and found >= options.bar * len(outcomes) else 1


def read(path: Path, mutants: Iterable[Mutant]) -> Mapping[str, Outcome]:
    """Return the newest outcome of each of `mutants`, as they are now, that `path` keeps."""
    listed = {mutant.name: mutant for mutant in mutants}
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        mutant = listed.get(row["name"])
        if mutant is not None and _texts(mutant) == row["changes"]:
            outcomes[mutant.name] = Outcome(mutant, row["found_by"], row["error"], row["took_s"])
    return outcomes


def _texts(mutant: Mutant) -> list[list[str]]:
    return [[change.old, change.new] for change in mutant.changes]


def keep(path: Path, outcome: Outcome) -> None:
    """Append `outcome` to `path` as a line of JSON."""
    mutant = outcome.mutant
    row = {
        "name": mutant.name, "changes": _texts(mutant),
        "found_by": outcome.found_by, "error": outcome.error, "took_s": outcome.took_s,
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run(mutants: Iterable[Mutant], jobs: int, results: Path | None = None) -> list[Outcome]:
    """Return the outcomes as they came; print each, and keep it in `results`, when it is known."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    outcomes: list[Outcome] = []

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="lighthouse-mutant-") as folder:
            copy = Path(folder)
            for name in COPIED:
                _copy(ROOT / name, copy / name)
            with contextlib.suppress(queue.Empty):
                while True:
                    outcomes.append(outcome := attempt(waiting.get_nowait(), copy))
                    print(outcome, flush=True)
                    if results is not None:
                        keep(results, outcome)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def attempt(mutant: Mutant, copy: Path) -> Outcome:
    """Try one mutant in `copy`, a copy of the project, which is as before when this returns."""
    originals: dict[Path, str] = {}
    began_at = time.monotonic()
    try:
        for module, source in mutant.sources().items():
            originals[copy / module] = (copy / module).read_text()
            _write(copy / module, source)
        found_by, error = _test(mutant, copy), ""
    except (ValueError, subprocess.TimeoutExpired) as e:
        found_by, error = ("a time-out", "") if isinstance(e, subprocess.TimeoutExpired) else ("", str(e))
    finally:
        for path, source in originals.items():
            _write(path, source)
    return Outcome(mutant, found_by, error, time.monotonic() - began_at)


def table(outcomes: Iterable[Outcome]) -> Iterable[str]:
    """Yield the lines of a Markdown table: how many of each module's mutants are found, and which are not."""
    yield "| module | mutants | found | not found |"
    yield "| --- | --- | --- | --- |"
    by_module: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_module.setdefault(outcome.mutant.module, []).append(outcome)
    for module, rows in by_module.items():
        yield _row(f"`{module}`", rows)
    yield _row("all", [outcome for rows in by_module.values() for outcome in rows])


def _row(title: str, outcomes: Sequence[Outcome]) -> str:
    missed = [outcome.mutant.name + " (invalid)" * bool(outcome.error) for outcome in outcomes if not outcome.found_by]
    found = len(outcomes) - len(missed)
    return f"| {title} | {len(outcomes)} | {found} ({found / len(outcomes):.1%}) | {', '.join(missed)} |"


def _test(mutant: Mutant, copy: Path) -> str:
    """The first test that fails; empty: all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-rfE",
        TEST_TIMEOUT,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "1000"}
    for tests in mutant.tests:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if done.returncode == FAILED:
            return first_failure(done.stdout) or ("a time-out" if "Timeout" in done.stderr else "an error")
        if done.returncode != 0:
            raise ValueError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return ""


def first_failure(output: str) -> str:
    """The name of a test in pytest's short summary. Raises ValueError if the mutant is not a defect but broken code."""
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, reason = line.split(" ", 1)[1].partition(" - ")
            if reason.startswith(NO_DEFECT):
                raise ValueError(f"{test}: {reason}")
            return test
    return ""


def _write(path: Path, source: str) -> None:
    path.write_text(source)
    moment = next(_moments)
    os.utime(path, (moment, moment))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
