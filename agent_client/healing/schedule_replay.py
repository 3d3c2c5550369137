"""What a script moves beside the optimizer: its schedulers, and what says itself how it is moved.

While a rank catches up, the script goes on moving them, one step after the other, and they belong to the state that is
held, which is older. So what it did is counted, taken back, and done again when the step after which it was done is
applied.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from agent_client.errors import ConfigurationError
from agent_client.state.train_state import Stateful


@runtime_checkable
class Replayable(Protocol):
    def replay_step(self) -> None:
        """Move as the script does it after each committed step."""
        ...


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How often each was moved: `between` the step before and the beginning of this one, `inside` this one."""

    between: dict[str, int]
    inside: dict[str, int]


class ScheduleReplay:
    """`others` by name. Raises ConfigurationError for what cannot be moved again."""

    def __init__(self, others: dict[str, Stateful]) -> None:
        self._others = others
        self._optimizer: Optimizer | None = None
        self._states: dict[str, Any] = {}
        self._settings: list[dict[str, Any]] = []
        self._saved: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        for name, other in others.items():
            _check(name, other)

    def attach(self, optimizer: Optimizer) -> None:
        """Whose settings (the learning rate, the momentum) they move."""
        self._optimizer = optimizer

    @property
    def saved(self) -> dict[str, Any]:
        """Their states, as they were saved."""
        return self._states

    def begin(self) -> None:
        """A step begins."""
        self._begun = self._counts()

    def save(self) -> None:
        """They are now as they belong to the state that is held."""
        for name in self._others.keys() - self._states.keys():
            _check(name, self._others[name])
        self._states = {name: copy.deepcopy(other.state_dict()) for name, other in self._others.items()}
        self._settings = [_settings(group) for group in self._groups]
        self._saved = self._counts()

    def take_back(self) -> StepCounts:
        """What the script did since they were saved."""
        now = self._counts()
        between = {name: self._begun.get(name, count) - self._saved.get(name, count) for name, count in now.items()}
        inside = {name: count - self._begun.get(name, count) for name, count in now.items()}
        for name, other in self._others.items():
            other.load_state_dict(copy.deepcopy(self._states[name]))
            if name not in now:
                between[name] = 1
        for group, settings in zip(self._groups, self._settings, strict=True):
            group.update(copy.deepcopy(settings))
        return StepCounts(between, inside)

    def move(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            other = self._others[name]
            for _ in range(count):
                other.step() if isinstance(other, LRScheduler) else other.replay_step()  # type: ignore[attr-defined]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def _counts(self) -> dict[str, int]:
        """Of the schedulers, which count themselves."""
        return {name: other.last_epoch for name, other in self._others.items() if isinstance(other, LRScheduler)}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _check(name: str, other: object) -> None:
    counts_itself = isinstance(other, LRScheduler) and isinstance(getattr(other, "last_epoch", None), int)
    if isinstance(other, Replayable) or (counts_itself and not isinstance(other, ReduceLROnPlateau)):
        return
    raise ConfigurationError(
        f"heal_mode catch_up: it is unknown how {name!r}, a {type(other).__name__}, moves from step to step; give it a "
        "method replay_step() that does what the script does to it after a committed step, or use heal_mode='blocking'"
    )
