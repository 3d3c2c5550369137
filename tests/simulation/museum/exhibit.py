"""A planted defect: a few methods of the machines (or of the simulator's drivers) replaced, and where it shows."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

from tests.simulation.quorums.plan import Plan, draw_plan
from tests.simulation.quorums.simulation import run_plan
from tests.simulation.world import Result

SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """The plan that a seed draws, weighed towards a defect: `plan` and `config` say what is fixed."""

    scenario: str = "storm"
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def draw(self, seed: int) -> Plan:
        drawn = draw_plan(seed, seconds=SECONDS, scenario=self.scenario, groups=self.plan.get("groups"))
        return replace(drawn, **{**self.plan, "config": replace(drawn.config, **self.config)})


@dataclass(frozen=True, slots=True)
class Replaced:
    """`owner.name` is `by` while the defect is planted."""

    owner: type | ModuleType
    name: str
    by: Any


@dataclass(frozen=True, slots=True)
class Exhibit:
    """`rule` is the one whose checker finds it; `shown_by` are seeds among which are some that do."""

    name: str
    defect: str
    rule: str
    recipe: Recipe
    replaced: tuple[Replaced, ...]
    shown_by: range = range(12)

    @contextmanager
    def planted(self) -> Generator[None]:
        with ExitStack() as stack:
            for change in self.replaced:
                stack.enter_context(mock.patch.object(change.owner, change.name, change.by))
            yield

    def run(self, seed: int) -> Result:
        """As it is now: planted or not."""
        return run_plan(self.recipe.draw(seed))

    def is_found(self, seed: int) -> bool:
        return self.run(seed).violation.startswith(f"{self.rule} ")
