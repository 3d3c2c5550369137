"""Mutants: small defects to plant in the source, kept as text, one file of them for each module.

A mutant replaces `old`, which occurs in its module exactly once, by `new`. It is found if a test of its module's list
fails.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("modules")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`tests` are paths below the root, the closest first; `says` states the rule that the mutant breaks."""

    name: str
    module: str
    says: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, source: str) -> str:
        """Return `source` with the defect. Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: occurs {count} times in {self.module}, not once: {self.old!r}")
        return source.replace(self.old, self.new)


def load() -> list[Mutant]:
    """Return all mutants, sorted by module and in the order of their file."""
    return [mutant for path in sorted(FOLDER.glob("*.toml")) for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    document = tomllib.loads(path.read_text())
    for row in document["mutant"]:
        tests = (*row.get("tests", ()), *document["tests"])
        yield Mutant(row["name"], document["module"], row["says"], row["old"], row["new"], tests)
