"""Replica groups of one rank that train in step, each in a thread of this process: an Agent without torch."""

import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from agent_client.errors import GroupDrained
from agent_client.manager_client.client import ManagerConnection
from lighthouse_protocol.refusals import LighthouseError

TIMEOUT_S = 120.0
VOTE_S = 10.0


class Lockstep:
    """A substitute for a collective. It completes for (quorum_id, step) when every participant has reached it.

    After `hold`, all of them stay in it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._is_held = False

    def hold(self, is_held: bool = True) -> None:
        self._is_held = is_held
        self.wake()

    def wake(self) -> None:
        """Check whether the collective is complete or aborted."""
        with self._changed:
            self._changed.notify_all()

    def run(self, key: tuple[int, int], me: str, everybody: Sequence[str], is_aborted: Callable[[], bool]) -> bool:
        """Return whether it completed."""

        def is_complete() -> bool:
            return not self._is_held and self._reached[key].issuperset(everybody)

        with self._changed:
            self._reached[key].add(me)
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_complete() or is_aborted(), TIMEOUT_S)
            return is_complete()


class LockstepRank:
    """Trains until its group is drained, or its manager has gone otherwise."""

    def __init__(self, name: str, manager: str, lockstep: Lockstep, step_s: float = 0.0, jitter: float = 0.0) -> None:
        """Start the thread. `step_s` is the time to compute a step, and `jitter` the share by which it varies."""
        self.name, self.reduce = name, lockstep
        self._compute_s = step_s * (1 - jitter), step_s * (1 + jitter)
        self.commits: list[tuple[int, int]] = []
        """Step and quorum_id of each."""
        self.discards = self.size = 0
        """`size`: the number of groups in the newest quorum."""
        self.drained = self.error = ""
        self._failures, self._has_lost_manager = 0, False
        self._link = ManagerConnection(manager, 0, secrets.token_hex(6), self._on_revoked, returns_within_s=0.0)
        self._thread = threading.Thread(target=self._train, name=f"group {name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.join()
        self._link.close()

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
        answer = self._link.ask(step, "", tag_quorum_id=tag, commit_failures=self._failures, timeout_s=TIMEOUT_S)
        self.size = len(answer.replica_ids)
        time.sleep(random.uniform(*self._compute_s))
        key = answer.quorum_id, answer.max_step
        yes = self.reduce.run(key, self.name, answer.replica_ids, lambda: self._is_over(answer.quorum_id))
        if self._link.vote(answer.max_step, yes, quorum_id=answer.quorum_id, timeout_s=VOTE_S):
            self.commits.append((answer.max_step, answer.quorum_id))
            self._failures = 0
        else:
            self.discards, self._failures = self.discards + 1, self._failures + 1

    def _is_over(self, quorum_id: int) -> bool:
        """Return whether the quorum was revoked. The end of the watch stands for all revokes."""
        return self._has_lost_manager or self._link.watch.revoked(quorum_id) is not None

    def _on_revoked(self, quorum_id: int | None, _: str) -> None:
        self._has_lost_manager |= quorum_id is None
        self.reduce.wake()
