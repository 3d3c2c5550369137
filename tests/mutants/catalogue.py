"""Mutants: small defects to plant in the source, kept as text, one file of them for each module.

A mutant replaces `old`, which occurs in its module exactly once, by `new`. It is found if a test of its module's list
fails. Some mutants also name the rule of a checker of the simulation that must find them; tests/simulation/planted.py
plants these in its own process.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("modules")
SEEDS_CLEAN = "tests/simulation/test_planted.py::test_the_seeds_are_clean_without_it[{}] -m slow"


@dataclass(frozen=True, slots=True)
class Change:
    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return `source` with the change. Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"occurs {count} times in {self.module}, not once: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Shown:
    """The seeds of the simulation that show a mutant, and how their plans differ from what they draw."""

    rule: str
    """The rule whose checker finds the mutant: S1 to S14 of quorums, G1 to G13 of runs."""
    seeds: tuple[int, int] = (0, 12)
    """The range of seeds. At least one of them shows the mutant."""
    scenario: str = "storm"
    like: tuple[str, ...] = ()
    """Names of presets in tests/simulation/planted.py."""
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the plan's QuorumConfig."""
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the plan's RunTerms."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests` are paths below the root, the closest first; `says` states the rule that the mutant breaks."""

    name: str
    says: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    shown: Shown | None = None

    @property
    def module(self) -> str:
        return self.changes[0].module

    def sources(self) -> dict[str, str]:
        """Return the changed source of each module. Raises ValueError if a change does not fit."""
        sources: dict[str, str] = {}
        for change in self.changes:
            try:
                source = sources.get(change.module) or (ROOT / change.module).read_text()
                sources[change.module] = change.apply(source)
            except ValueError as e:
                raise ValueError(f"{self.name}: {e}") from e
        return sources


def load() -> list[Mutant]:
    """Return all mutants, sorted by module and in the order of their file."""
    return [mutant for path in sorted(FOLDER.glob("*.toml")) for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    document = tomllib.loads(path.read_text())
    module = document["module"]
    for row in document["mutant"]:
        changes = tuple(
            Change(each.get("module", module), each["old"], each["new"]) for each in (row, *row.get("also", ()))
        )
        shown = Shown(**row["shown"]) if "shown" in row else None
        tests = (*row.get("tests", ()), *document["tests"], *([SEEDS_CLEAN.format(row["name"])] if shown else ()))
        yield Mutant(row["name"], row["says"], changes, tests, shown)
