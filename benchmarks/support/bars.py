"""What a benchmark must reach, and whether it did."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from benchmarks.support.figures import table

check_option = click.option("--check", is_flag=True, help="End with status 1 if a bar is missed.")


@dataclass(frozen=True, slots=True)
class Bar:
    """`value` was measured; more than `limit` is a miss."""

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def conclude(bars: Sequence[Bar], *, is_checked: bool) -> None:
    """Show them. Ends the program with status 1 where one is missed and that is to be checked."""
    click.echo("\n" + table(["bar", "measured", "at most", "met"], [_cells(bar) for bar in bars]))
    if is_checked and not all(bar.is_met for bar in bars):
        sys.exit(1)


def _cells(bar: Bar) -> list[str]:
    return [bar.what, f"{bar.value:.4g} {bar.unit}", f"{bar.limit:g} {bar.unit}", "yes" if bar.is_met else "**no**"]
