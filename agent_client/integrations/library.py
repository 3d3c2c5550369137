"""Code that the integrations share: import errors with advice, checks, epoch counts, and entries of the TrainState.

Each module of this package integrates one library, which may not be installed.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from agent_client.errors import ConfigurationError
from agent_client.step.agent import Agent


@contextlib.contextmanager
def library(name: str, requirement: str) -> Generator[None]:
    """Add `pip install` and `requirement` to the error message if importing library `name` fails in the context."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != name:
            raise  # the library is installed and lacks a dependency
        raise ModuleNotFoundError(f"{name} is not installed: pip install '{requirement}'", name=e.name) from e


def check_max_steps(max_steps: int) -> None:
    if max_steps <= 0:
        raise ConfigurationError(
            "max_steps: give the number of steps to commit; the number of steps in an epoch changes whenever a "
            "replica group joins or leaves"
        )


def epochs_of(agent: Agent) -> float:
    """Return the number of epochs, such as 1.5, that all groups together have trained in committed steps."""
    report = agent.data_report()
    return report["samples"] / report["length"] if report else 0.0


def train_state_entries(scaler: Any, schedulers: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the schedulers and the scaler as entries for a TrainState. All groups need them in the same order."""
    found = {f"scheduler_{number}": scheduler for number, scheduler in enumerate(schedulers)}
    return found if scaler is None else {**found, "scaler": scaler}
