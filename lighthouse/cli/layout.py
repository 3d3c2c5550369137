"""Tables that fit a given width, and the console on which the verbs print them.

To fit, a table first omits its least important columns and then shortens the widest ones. Lines do not wrap.
rich.table.Table cannot omit columns, and takes seconds for the thousands of rows of a large job.
"""

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from lighthouse_runtime.cli import printable

T = TypeVar("T")

GAP = 2
NARROWEST = 6


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table whose rows are of type T."""

    title: str
    text: Callable[[T], str]
    style: Callable[[T], str] = lambda _: ""
    is_number: bool = False
    keep: int | None = None  # columns with the lowest number are omitted first; None keeps the column
    comfort: int | None = None  # width to which the column is cut before others are omitted
    tells_apart: bool = False  # shown only if rows differ in it
    is_prose: bool = False  # cut at its end, not in the middle

    def lines(self, rows: Sequence[T]) -> list[Text]:
        return [Text(self.title, "bold"), *(Text(printable(self.text(row)), self.style(row)) for row in rows)]


def table(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[Text]:
    """Return the lines of a table: titles, then one line per row, each at most `width` cells wide."""
    columns = [c for c in columns if not c.tells_apart or len({c.text(row) for row in rows}) > 1]
    cells = {column.title: column.lines(rows) for column in columns}
    natural = {title: max(line.cell_len for line in lines) for title, lines in cells.items()}
    widths = fit(columns, natural, width)
    for column in columns:
        for cell in cells[column.title] if column.title in widths else ():
            cell.plain = (cut if column.is_prose else shorten)(cell.plain, widths[column.title])
            cell.align("right" if column.is_number else "left", widths[column.title])
    lines = [Text(" " * GAP).join(row) for row in zip(*(cells[title] for title in widths), strict=True)]
    for line in lines:
        line.rstrip()
        line.truncate(width)
    return lines


def fit(columns: Sequence[Column[T]], natural: Mapping[str, int], width: int) -> dict[str, int]:
    """Choose which columns to show and their widths.

    Args:
        columns: All columns.
        natural: Width that each column needs to show every cell in full, by title.
        width: Available width in cells.

    Returns:
        The widths of the shown columns, by title.
    """
    least = {column.title: min(natural[column.title], column.comfort or natural[column.title]) for column in columns}
    shown = list(columns)
    for column in sorted((column for column in columns if column.keep is not None), key=lambda c: c.keep or 0):
        if _total(least) <= width:
            break
        shown.remove(column)
        del least[column.title]
    widths = {column.title: natural[column.title] for column in shown}
    is_enough = _total(least) <= width
    for column in sorted((column for column in shown if column.comfort), key=lambda c: -widths[c.title]):
        wide, excess = widths[column.title], max(0, _total(widths) - width)
        floor = least[column.title] if is_enough else NARROWEST
        widths[column.title] = max(min(wide, floor), wide - excess)
    return widths


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def shorten(text: str, width: int) -> str:
    """Shorten a name by cutting its middle, because names within a job often differ only at their end."""
    if cell_len(text) <= width:
        return text
    if width < 4:
        return set_cell_size(text, max(0, width))
    tail = (width - 1) // 2
    return set_cell_size(text, width - 1 - tail) + "…" + set_cell_size(text[::-1], tail)[::-1]


def cut(text: str, width: int) -> str:
    """Shorten a text by cutting its end."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"[:width]


def share(budget: int, wants: Sequence[int]) -> list[int]:
    """Divide `budget` evenly, but give no entry more than its value in `wants`. Return the shares in the same order."""
    given = [0] * len(wants)
    left, remaining = max(0, budget), len(wants)
    for index in sorted(range(len(wants)), key=wants.__getitem__):
        given[index] = min(wants[index], left // remaining)
        left, remaining = left - given[index], remaining - 1
    return given


UNBOUNDED = 100_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console as wide as the terminal, or of unlimited width if the output is not a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    is_bounded = is_terminal() or "COLUMNS" in os.environ
    return _Console(highlight=False, width=None if is_bounded else UNBOUNDED)


def is_terminal() -> bool:
    return bool(sys.stdout) and sys.stdout.isatty()


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    console.print(Text("\n").join(lines), soft_wrap=True)
