"""Replica groups of one rank each that train in step, as threads: an Agent without torch."""

import contextlib
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from agent_client.errors import GroupDrained
from agent_client.manager_client.client import ManagerConnection
from lighthouse_protocol.refusals import LighthouseError
from tests.processes import PATIENCE_S, Lighthouse, Manager, eventually, together

VOTE_S = 10.0


class AllReduce:
    """Completes for (quorum_id, step) when every participant is there; `hold` keeps them all in it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._is_held = False

    def hold(self, is_held: bool = True) -> None:
        with self._changed:
            self._is_held = is_held
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def run(self, key: tuple[int, int], me: str, everybody: Sequence[str], is_aborted: Callable[[], bool]) -> bool:
        """Whether it completed."""

        def is_complete() -> bool:
            return not self._is_held and self._there[key].issuperset(everybody)

        with self._changed:
            self._there[key].add(me)
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_complete() or is_aborted(), PATIENCE_S)
            return is_complete()


@dataclass
class Group:
    """Trains until it is drained, or its manager has gone otherwise. `commits` are (step, quorum_id)."""

    name: str
    manager: Manager
    reduce: AllReduce
    step_s: float = 0.0
    commits: list[tuple[int, int]] = field(default_factory=list)
    discards: int = 0
    drained: str = ""
    error: str = ""

    def __enter__(self) -> Self:
        self._failures = 0
        self._has_lost_manager = False
        self._link = ManagerConnection(
            self.manager.address, 0, secrets.token_hex(6), self._on_revoked, returns_within_s=0.0
        )
        self._thread = threading.Thread(target=self._train, name=f"group {self.name}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.kill()
        self.reduce.hold(False)
        self.join()
        self._link.close()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _train(self) -> None:
        try:
            while True:
                self._step()
        except GroupDrained as e:
            self.drained = str(e)
        except LighthouseError as e:
            self.error = str(e)

    def _step(self) -> None:
        step, tag = (self.commits[-1][0] + 1, self.commits[-1][1]) if self.commits else (0, 0)
        answer = self._link.ask(step, "", tag_quorum_id=tag, commit_failures=self._failures, timeout_s=PATIENCE_S)
        time.sleep(self.step_s)
        key = answer.quorum_id, answer.max_step
        yes = self.reduce.run(key, self.name, answer.replica_ids, lambda: self._is_over(answer.quorum_id))
        if self._link.vote(answer.max_step, yes, quorum_id=answer.quorum_id, timeout_s=VOTE_S):
            self.commits.append((answer.max_step, answer.quorum_id))
            self._failures = 0
        else:
            self.discards, self._failures = self.discards + 1, self._failures + 1

    def _is_over(self, quorum_id: int) -> bool:
        """By a revoke, or by the end of the watch, which stands for all."""
        return self._has_lost_manager or self._link.watch.revoked(quorum_id) is not None

    def _on_revoked(self, quorum_id: int | None, _: str) -> None:
        self._has_lost_manager |= quorum_id is None
        self.reduce.wake()


@contextlib.contextmanager
def training(
    lighthouse: "Lighthouse | str", job: str, names: str, step_s: float = 0.0, env: Mapping[str, str] | None = None
) -> Generator[tuple[Group, ...]]:
    """All in one quorum, and in step 3 or later. `lighthouse`: or its addresses. `env`: of the managers."""
    reduce = AllReduce()
    address = lighthouse if isinstance(lighthouse, str) else lighthouse.address
    managers = [Manager(address, name, "--job", job, env=env) for name in names]
    with together(*managers), contextlib.ExitStack() as stack:
        groups = tuple(
            stack.enter_context(Group(name, manager, reduce, step_s))
            for name, manager in zip(names, managers, strict=True)
        )
        eventually(lambda: all(len(group.commits) > 3 for group in groups), "all train")
        yield groups
