"""The picture of the house: each package's rooms in the layers of its contract, and who imports whom.

python -m tests.architecture.drawing    writes docs/house.svg
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

import grimp

from tests.docs.pages import REPOSITORY

PICTURE = REPOSITORY / "docs" / "house.svg"
FLOORS = (("lighthouse", "manager", "agent_client"), ("lighthouse_runtime",), ("lighthouse_protocol",))
ROOM_W, ROOM_H, GAP, ROW_GAP, PAD, HEAD = 126, 30, 8, 32, 14, 38

STYLE = """
  svg { --package: #f7f9fb; --room: #ffffff; --ink: #17212b; --edge: #98a3ae; --line: #7d8996 }
  @media (prefers-color-scheme: dark) {
    svg { --package: #19212a; --room: #252e38; --ink: #e8eef4; --edge: #66737f; --line: #8290a0 }
  }
  text { font: 15px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central; fill: var(--ink) }
  text.name { font-size: 18px; font-weight: 600; text-anchor: start }
  rect.package { fill: var(--package); stroke: var(--edge); rx: 10px }
  rect.room { fill: var(--room); stroke: var(--edge); rx: 6px }
  line { stroke: var(--line); stroke-opacity: 0.55; marker-end: url(#arrow) }
  marker path { fill: var(--line) }
"""


@dataclass(frozen=True)
class Package:
    """`rows`: its rooms, the highest layer first. A room imports only what is below it."""

    name: str
    rows: tuple[tuple[str, ...], ...]
    imports: frozenset[tuple[str, str]]

    @property
    def width(self) -> int:
        widest = max(len(row) for row in self.rows)
        return widest * (ROOM_W + GAP) - GAP + 2 * PAD

    @property
    def height(self) -> int:
        return HEAD + len(self.rows) * (ROOM_H + ROW_GAP) - ROW_GAP + PAD

    def drawn(self, x: int, y: int, width: int, height: int) -> Iterable[str]:
        yield f'<rect class="package" x="{x}" y="{y}" width="{width}" height="{height}"/>'
        yield f'<text class="name" x="{x + PAD}" y="{y + HEAD // 2}">{self.name}</text>'
        places: dict[str, tuple[float, int]] = {}
        for number, row in enumerate(self.rows):
            left = x + (width - len(row) * (ROOM_W + GAP) + GAP) / 2
            top = y + HEAD + number * (ROOM_H + ROW_GAP)
            places |= {room: (left + at * (ROOM_W + GAP), top) for at, room in enumerate(row)}
        for upper, lower in sorted(self.imports):
            (x1, y1), (x2, y2) = places[upper], places[lower]
            yield f'<line x1="{x1 + ROOM_W / 2:g}" y1="{y1 + ROOM_H}" x2="{x2 + ROOM_W / 2:g}" y2="{y2}"/>'
        for room, (left, top) in places.items():
            yield f'<rect class="room" x="{left:g}" y="{top}" width="{ROOM_W}" height="{ROOM_H}"/>'
            yield f'<text x="{left + ROOM_W / 2:g}" y="{top + ROOM_H // 2}">{room}</text>'


def packages() -> dict[str, Package]:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["containers"][0]: contract["layers"] for contract in contracts if "containers" in contract}
    graph = grimp.build_graph(*layers, cache_dir=None)
    drawn = {}
    for name, rows in layers.items():
        split = tuple(tuple(room.strip() for room in row.split("|")) for row in rows)
        drawn[name] = Package(name, split, frozenset(imports_of(graph, name)))
    return drawn


def imports_of(graph: grimp.ImportGraph, package: str) -> Iterable[tuple[str, str]]:
    """(room, other room that it imports). A room is what stands in the package's folder: a folder or a file. The
    package itself is the door of all."""
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            here, there = module.split("."), imported.split(".")
            if here[0] == there[0] == package and len(here) > 1 and len(there) > 1 and here[1] != there[1]:
                yield here[1], there[1]


def picture() -> str:
    house = packages()
    width = max(sum(house[name].width + GAP for name in floor) - GAP for floor in FLOORS)
    shapes: list[str] = []
    y = PAD
    for floor in FLOORS:
        spare = (width - sum(house[name].width + GAP for name in floor) + GAP) // len(floor)
        height = max(house[name].height for name in floor)
        x = PAD
        for name in floor:
            shapes += house[name].drawn(x, y, house[name].width + spare, height)
            x += house[name].width + spare + GAP
        y += height + GAP
    wide, high = width + 2 * PAD, y + PAD - GAP
    size = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    arrow = '<marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    head = f'<defs>{arrow}<path d="M0 0L6 3L0 6z"/></marker></defs>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>", head, *shapes, "</svg>\n"]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
