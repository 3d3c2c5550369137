"""Nothing imports itself by a detour: no circle of modules, anywhere, and none of rooms inside a package."""

import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter

import grimp
import pytest

from tests.architecture.drawing import imports_of
from tests.docs.pages import REPOSITORY

PACKAGES = ("lighthouse_protocol", "lighthouse_runtime", "lighthouse", "manager", "agent_client")
MAX_ROOMS = 10
AGGREGATES = ("lighthouse.job", "manager.group")
EDGES = {"driver", "run_driver", "incident_driver", "link", "log", "registry"}
"""The modules of an aggregate that may have I/O."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, "benchmarks", "examples", cache_dir=None)


def test_no_module_imports_itself_by_a_detour(graph: grimp.ImportGraph) -> None:
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "examples"])
def test_no_room_imports_itself_by_a_detour(graph: grimp.ImportGraph, package: str) -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for room, imported in imports_of(graph, package):
        rooms[room].add(imported)
    TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_no_rule_of_an_aggregate_imports_its_edges(graph: grimp.ImportGraph, aggregate: str) -> None:
    edges = {f"{aggregate}.{edge}" for edge in EDGES}
    rules = graph.find_children(aggregate) - edges
    assert rules
    assert [(rule, found) for rule in rules if (found := graph.find_modules_directly_imported_by(rule) & edges)] == []


def test_the_lighthouse_has_rooms_that_one_can_count(graph: grimp.ImportGraph) -> None:
    assert len(graph.find_children("lighthouse")) <= MAX_ROOMS


def test_each_package_says_that_it_is_typed() -> None:
    """Else type checkers ignore all that a training script gets of it."""
    hatch = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(hatch["packages"]) == set(PACKAGES)
    assert all((REPOSITORY / package / "py.typed").exists() for package in PACKAGES)
