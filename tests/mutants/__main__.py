"""Plant each mutant in a copy of the project and run its tests: `python -m tests.mutants [NAME ...]`."""

import argparse
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import ROOT, Mutant, load

COPIED = (
    "lighthouse", "manager", "agent_client", "protos", "lighthouse_runtime",
    "tests", "examples", "benchmarks", "deploy", "docs", "pyproject.toml", "README.md",
)  # fmt: skip
TIMEOUT_S = 600.0
FAILED = 1  # pytest: tests ran, and some failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """`found_by`: the test that failed first; empty: none did. `error`: the mutant could not be tried."""

    mutant: Mutant
    found_by: str = ""
    error: str = ""
    took_s: float = 0.0

    def __str__(self) -> str:
        verdict = self.error or (f"found by {self.found_by}" if self.found_by else "SURVIVED")
        return f"{self.mutant.module} {self.mutant.name}: {verdict} ({self.took_s:.0f} s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if at least `--bar` of the mutants are found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of mutants, or parts of their modules' paths; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the project to test at once")
    parser.add_argument("--bar", type=float, default=0.95, help="share that must be found")
    parser.add_argument("--table", action="store_true", help="print the table of docs/testing.md at the end")
    options = parser.parse_args(arguments)
    mutants = [m for m in load() if not options.names or any(n == m.name or n in m.module for n in options.names)]
    outcomes = run(mutants, options.jobs)
    if options.table:
        print(*table(outcomes), sep="\n")
    found = sum(bool(outcome.found_by) for outcome in outcomes)
    print(f"{found} of {len(outcomes)} mutants found")
    return 0 if outcomes and found >= options.bar * len(outcomes) else 1


def run(mutants: Iterable[Mutant], jobs: int) -> list[Outcome]:
    """Return the outcomes in the order of `mutants`; print each when it is known."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    order = {mutant.name: number for number, mutant in enumerate(mutants)}
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

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes, key=lambda outcome: order[outcome.mutant.name])


def attempt(mutant: Mutant, copy: Path) -> Outcome:
    """Try one mutant in `copy`, a copy of the project, which is as before when this returns."""
    path = copy / mutant.module
    source, began_at = path.read_text(), time.monotonic()
    try:
        path.write_text(mutant.plant(source))
        found_by, error = _test(mutant, copy), ""
    except (ValueError, subprocess.TimeoutExpired) as e:
        found_by, error = ("a time-out", "") if isinstance(e, subprocess.TimeoutExpired) else ("", str(e))
    finally:
        path.write_text(source)
    return Outcome(mutant, found_by, error, time.monotonic() - began_at)


def table(outcomes: Iterable[Outcome]) -> Iterable[str]:
    """Yield the lines of a Markdown table."""
    yield "| module | mutant | what it breaks | found by |"
    yield "| --- | --- | --- | --- |"
    for outcome in outcomes:
        mutant = outcome.mutant
        found_by = outcome.found_by.removeprefix("tests/") or "nothing"
        yield f"| `{mutant.module}` | {mutant.name} | {mutant.says} | `{found_by}` |"


def _test(mutant: Mutant, copy: Path) -> str:
    """The first test that fails; empty: all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for tests in mutant.tests:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if done.returncode == FAILED:
            return _first_failure(done.stdout) or "an error"
        if done.returncode != 0:
            raise ValueError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return ""


def _first_failure(output: str) -> str:
    """The name of a test in pytest's short summary."""
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1]
    return ""


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
