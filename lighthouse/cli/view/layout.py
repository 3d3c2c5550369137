"""Columns that fit a width: the least important are left out, the rest are cut, nothing wraps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lighthouse_runtime.cli.terminal import printable

T = TypeVar("T")

GAP = 2
NARROWEST = 6


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """`keep`: the lower, the sooner it is left out; None: never. `comfort`: cut to this before others are left out."""

    title: str
    text: Callable[[T], str]
    style: Callable[[T], str] = lambda _: ""
    is_number: bool = False
    keep: int | None = None
    comfort: int | None = None


def table(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[Text]:
    """A line of titles and a line per row, none longer than `width`."""
    cells = [[printable(column.text(row)) for row in rows] for column in columns]
    natural = [max(map(cell_len, [column.title, *texts])) for column, texts in zip(columns, cells, strict=True)]
    widths = fit(columns, natural, width)
    shown = [index for index, wide in enumerate(widths) if wide]
    lines = [_line((_cell(columns[i].title, widths[i], columns[i].is_number), "bold") for i in shown)]
    for at, row in enumerate(rows):
        lines.append(
            _line((_cell(cells[i][at], widths[i], columns[i].is_number), columns[i].style(row)) for i in shown)
        )
    for line in lines:
        line.truncate(width)
    return lines


def fit(columns: Sequence[Column[T]], natural: Sequence[int], width: int) -> list[int]:
    """The width of each column; 0 where it is left out."""
    widths = list(natural)
    least = [min(wide, column.comfort or wide) for column, wide in zip(columns, natural, strict=True)]
    for index in _drop_order(columns):
        if _total(least) <= width:
            break
        least[index] = widths[index] = 0
    for index in _widest_comfort(columns, widths):
        excess = max(0, _total(widths) - width)
        floor = least[index] if _total(least) <= width else NARROWEST
        widths[index] = max(min(widths[index], floor), widths[index] - excess)
    return widths


def _drop_order(columns: Sequence[Column[T]]) -> list[int]:
    droppable = [(column.keep, index) for index, column in enumerate(columns) if column.keep is not None]
    return [index for _, index in sorted(droppable)]


def _widest_comfort(columns: Sequence[Column[T]], widths: Sequence[int]) -> list[int]:
    return sorted((i for i, c in enumerate(columns) if c.comfort and widths[i]), key=lambda i: -widths[i])


def _total(widths: Sequence[int]) -> int:
    shown = [wide for wide in widths if wide]
    return sum(shown) + GAP * (len(shown) - 1)


def _cell(text: str, width: int, is_number: bool) -> str:
    if cell_len(text) > width:
        return shorten(text, width)
    return text.rjust(width) if is_number else text + " " * (width - cell_len(text))


def shorten(text: str, width: int) -> str:
    """Cut in the middle: names of one job often differ at their end only."""
    if cell_len(text) <= width:
        return text
    if width < 4:
        return set_cell_size(text, max(0, width))
    tail = (width - 1) // 2
    return set_cell_size(text, width - 1 - tail) + "…" + set_cell_size(text[::-1], tail)[::-1]


def _line(cells: Iterator[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True, end="")
    for number, (text, style) in enumerate(cells):
        line.append(" " * GAP if number else "")
        line.append(text, style)
    line.rstrip()
    return line


def share(budget: int, wants: Sequence[int]) -> list[int]:
    """Deal `budget` out evenly; what one does not want goes to the others."""
    given = [0] * len(wants)
    left, remaining = max(0, budget), len(wants)
    for index in sorted(range(len(wants)), key=wants.__getitem__):
        given[index] = min(wants[index], left // remaining)
        left, remaining = left - given[index], remaining - 1
    return given
