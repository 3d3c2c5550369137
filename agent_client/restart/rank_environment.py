"""Where a generation puts this rank's place: in its State, and in RANK and WORLD_SIZE while it runs."""

import os

from agent_client.restart.rules.events import Run
from agent_client.restart.state import State

_NAMES = ("RANK", "WORLD_SIZE")


class RankEnvironment:
    """A context manager, whose end restores the environment."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> "RankEnvironment":
        self._before = {name: os.environ.get(name) for name in _NAMES}
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def take(self, run: Run) -> None:
        self.state.take(run.counters, run.rank, run.world_size)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(run.rank), str(run.world_size)
