"""Defects of lighthouses that share a store."""

from collections.abc import Callable, Sequence
from typing import Any

from lighthouse.store.etcd_store import Batch
from lighthouse.store.leadership import Candidate, Effect, Role
from lighthouse_runtime.server.streams import OutputGate
from tests.simulation.museum.exhibit import Replaced
from tests.simulation.quorums.two_lighthouses import Etcd


def _any_guards(self: Etcd, batch: Batch) -> bool:
    return True


def _leads_by_role(self: Candidate, now: float) -> bool:
    return self._role is Role.LEADING  # pyright: ignore[reportPrivateUsage]


def _never_ends(self: Candidate, now: float) -> Sequence[Effect]:
    return ()


def _next(self: Candidate) -> float | None:
    return self._next_at  # pyright: ignore[reportPrivateUsage]


def _no_hold(self: OutputGate) -> Callable[[], None]:
    return lambda: None


NO_FENCE: tuple[Any, ...] = (
    Replaced(Candidate, "may_act", _leads_by_role),
    Replaced(Candidate, "_check_fence", _never_ends),
    Replaced(Candidate, "deadline", _next),
)
UNGUARDED_WRITES = (Replaced(Etcd, "holds_guards", _any_guards),)
SAID_BEFORE_WRITTEN = (Replaced(OutputGate, "block", _no_hold),)
