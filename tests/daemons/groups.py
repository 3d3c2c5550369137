"""Replica groups of one rank each that train in step, as threads: an Agent without torch."""

import contextlib
from collections.abc import Generator, Mapping
from typing import Self

from benchmarks.support.lockstep import Lockstep, LockstepRank
from tests.processes import Lighthouse, Manager, eventually, together


class Group(LockstepRank):
    """With its manager, which is killed at the end."""

    def __init__(self, name: str, manager: Manager, reduce: Lockstep, step_s: float = 0.0) -> None:
        self.manager = manager
        super().__init__(name, manager.address, reduce, step_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.kill()
        self.reduce.hold(False)
        self.close()


@contextlib.contextmanager
def training(
    lighthouse: "Lighthouse | str", job: str, names: str, step_s: float = 0.0, env: Mapping[str, str] | None = None
) -> Generator[tuple[Group, ...]]:
    """All in one quorum, and in step 3 or later. `lighthouse`: or its addresses. `env`: of the managers."""
    reduce = Lockstep()
    address = lighthouse if isinstance(lighthouse, str) else lighthouse.address
    managers = [Manager(address, name, "--job", job, env=env) for name in names]
    with together(*managers), contextlib.ExitStack() as stack:
        groups = tuple(
            stack.enter_context(Group(name, manager, reduce, step_s))
            for name, manager in zip(names, managers, strict=True)
        )
        eventually(lambda: all(len(group.commits) > 3 for group in groups), "all train")
        yield groups
