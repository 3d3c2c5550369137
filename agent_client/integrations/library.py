"""A library that is not there: how to install it."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from agent_client.errors import ConfigurationError
from agent_client.step.agent import Agent


@contextlib.contextmanager
def library(name: str, requirement: str) -> Generator[None]:
    """Enclose its imports. `requirement`: what pip installs. Raises ModuleNotFoundError, with the command."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != name:
            raise  # one that the library itself lacks
        raise ModuleNotFoundError(f"{name} is not installed: pip install '{requirement}'", name=e.name) from e


# -- steps --------------------------------------------------------------------
#
# What every trainer's steps have in common: how many there are, and what heals with them.


def check_max_steps(max_steps: int) -> None:
    """Raises ConfigurationError where a training does not end by the number of its steps."""
    if max_steps <= 0:
        raise ConfigurationError(
            "max_steps: give the number of steps to commit; an epoch has another number of steps whenever a replica "
            "group comes or goes"
        )


def epochs_of(agent: Agent) -> float:
    """Return how often all groups together have trained on the whole data set, in the committed steps."""
    report = agent.data_report()
    return report["samples"] / report["length"] if report else 0.0


def healing_beside(scaler: Any, schedulers: Sequence[Any] = ()) -> dict[str, Any]:
    """For TrainState: what heals beside the model and its optimizer. `scaler`: None: there is none."""
    found = {f"scheduler_{number}": scheduler for number, scheduler in enumerate(schedulers)}
    return found if scaler is None else {**found, "scaler": scaler}
