"""Plant mutants of tests/mutants in this process, and run the seeds that must show them, to test the checkers."""

import importlib
import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

from tests.mutants.catalogue import Mutant, load
from tests.simulation.simulators import SIMULATORS
from tests.simulation.world import Result

SECONDS = 40.0
NATIVE = {"torchft": 0, "catch_up": 0.0, "fault_every_s": 1.0}
BY_SCENARIO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "storm": ({**NATIVE, "skips": 0.0}, {"stands": True}),
    "two_lighthouses": ({**NATIVE, "step_s": 0.2}, {}),
}
"""What the plan and the config of a scenario of quorums have unless a mutant says otherwise."""

ANY_SIZE = {"min_replicas": 1, "active": None, "allowed_sizes": frozenset[int]()}
SHORT = {"join_timeout_s": 1.5, "heartbeat_timeout_s": 1.5, "lease_s": 1.5}
LONG_LEASE = {"heartbeat_timeout_s": 1.5, "lease_s": 10.0}
TIMEOUTS = ("collective_timeout_s", "heal_timeout_s", "vote_timeout_s")
FREE = {
    "min_active": 1,
    "divisible_by": 1,
    "hosts_together": False,
    "max_iterations": None,
    "max_restarts": None,
    "restart_delay_s": None,
}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "any-size": ("config", ANY_SIZE),
    # One group trains and the other is a spare, so the next quorum need not share a member with the present one.
    "one-and-a-spare": ("config", {**ANY_SIZE, "active": 1}),
    "short": ("config", SHORT),
    "long-lease": ("config", LONG_LEASE),
    # Shows sooner what only the end of a run shows.
    "quick": ("plan", {"step_s": 0.5, "group_world_size": 1, **dict.fromkeys(TIMEOUTS, 2.0)}),
    # A manager is paused and its group restarts, while the paused manager may hold a lease.
    "restarted-beside-itself": (
        "plan",
        {
            "mix": (*3 * ("pause_manager",), "kill_group"),
            "groups": 2,
            "restart_s": 0.05,
            "step_s": 0.1,
            "fault_every_s": 0.5,
        },
    ),
    "crowded": ("plan", {"fault_every_s": 0.5, "restart_s": 0.05, "boot_s": 0.05, "interrupt_s": 0.01}),
    "pair": ("plan", {"hosts": 1, "ranks_per_host": 2}),
    "free": ("terms", FREE),
    "of-two": ("terms", {**FREE, "world_size": 2, "active": None}),
    "of-three": ("terms", {**FREE, "world_size": 3, "active": None}),
    "with-spares": ("terms", {**FREE, "active": 1}),
}

MUTANTS = {mutant.name: mutant for mutant in load() if mutant.shown is not None}
"""The mutants that the simulation must find."""


def run(mutant: Mutant, seed: int) -> Result:
    """Run a seed with the plan that shows a mutant. The mutant may be planted or not."""
    shown = mutant.shown
    assert shown is not None
    of_quorums = shown.rule.startswith("S")
    simulator = SIMULATORS["quorums" if of_quorums else "runs"]
    plan, config = BY_SCENARIO.get(shown.scenario, ({}, {})) if of_quorums else ({}, {})
    changes: dict[str, dict[str, Any]] = {"plan": dict(plan), "config": dict(config), "terms": {}}
    for part, fields in [PRESETS[name] for name in shown.like]:
        changes[part] |= fields
    changes["plan"] |= {key: tuple(value) if key == "mix" else value for key, value in shown.plan.items()}
    options = {"seconds": SECONDS, "groups": changes["plan"].get("groups")} if of_quorums else {}
    drawn = simulator.draw_plan(seed, scenario=shown.scenario, **options)
    part, fields = (
        ("config", changes["config"] | shown.config) if of_quorums else ("terms", changes["terms"] | shown.terms)
    )
    return simulator.run(replace(drawn, **{**changes["plan"], part: replace(getattr(drawn, part), **fields)}))


def finds(mutant: Mutant, seed: int) -> bool:
    """Return whether the checker of the mutant's rule reports a violation."""
    assert mutant.shown is not None
    return run(mutant, seed).violation.startswith(f"{mutant.shown.rule} ")


@contextmanager
def planted(mutant: Mutant) -> Generator[None]:
    """Replace the code of all functions in the mutant's modules."""
    originals: list[tuple[FunctionType, CodeType]] = []
    try:
        for path, source in mutant.sources().items():
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            codes = {code.co_qualname: code for code in _codes(compile(source, str(module.__file__), "exec"))}
            for function in _functions(vars(module), module.__name__):
                if (code := codes.get(function.__code__.co_qualname)) is not None:
                    originals.append((function, function.__code__))
                    function.__code__ = code
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(names: Mapping[str, Any], module: str) -> Iterator[FunctionType]:
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield function
