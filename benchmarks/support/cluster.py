"""Replica groups of one rank that train. The lighthouse, each manager and each rank are separate processes."""

import contextlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import (
    HERE,
    OURS,
    TORCHFT,
    Daemon,
    prepare_lighthouse,
    replace_lighthouse,
    start_lighthouse,
    start_manager,
)
from benchmarks.support.training_rank import Place
from examples.ports import free_port

NAMES = ("a", "b", "c")
STEP_S = 0.02
MIN_REPLICAS = 2
START_TIMEOUT_S = 180.0
SETTLED_STEPS = 5
RECENT_S = 1.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Event:
    """A line that a rank has printed (training_rank.py). `size` is the number of groups in its quorum."""

    at: float
    what: str
    quorum_id: int
    step: int
    size: int


@dataclass(slots=True)
class Group:
    """One start of a replica group. A thread of its own reads `events`."""

    manager: Daemon
    rank: Child
    events: list[Event] = field(default_factory=list[Event])

    def signal(self, number: int) -> None:
        self.manager.child.signal(number)
        self.rank.signal(number)

    def end(self) -> None:
        self.manager.child.end()
        self.rank.end()

    def since(self, at: float) -> list[Event]:
        recent = itertools.takewhile(lambda event: event.at >= at, reversed(self.events))
        return list(recent)[::-1]

    def commits(self, since: float) -> list[Event]:
        return [event for event in self.since(since) if event.what == "commit"]

    def read_events(self) -> None:
        with contextlib.suppress(ValueError):  # `end` closes the pipe
            for line in self.rank.lines():
                self.events.append(Event(*json.loads(line)))


class Cluster:
    def __init__(
        self,
        children: Children,
        product: str = OURS,
        heartbeat_timeout_s: float = 5.0,
        *,
        names: Sequence[str] = NAMES,
        min_replicas: int = MIN_REPLICAS,
        program: str = "training_rank",
        store: str = f"{HERE}:1",
        **told: Any,
    ) -> None:
        """Start all. `program` is the rank's, in this folder; it is also told `told`. All groups use `store`."""
        self._product, self._heartbeat_timeout_s, self._store = product, heartbeat_timeout_s, store
        self._program, self._told = f"benchmarks.support.{program}", told
        self._children = children
        self._peers: dict[str, Place] = {name: (HERE, free_port()) for name in names}
        self.lighthouse = start_lighthouse(children, product, min_replicas, heartbeat_timeout_s)
        self.groups = {name: self.start(name) for name in names}

    def replace(self, name: str) -> None:
        """End the rest of a group, restart it, and wait until all groups train."""
        self.groups[name].end()
        self.groups[name] = self.start(name)
        self.wait_training()

    def kill_lighthouse(self, away_s: float) -> float:
        """Kill our lighthouse, start another after `away_s`, and return the time of the kill."""
        old, timeout_s = self.lighthouse, self._heartbeat_timeout_s
        new = prepare_lighthouse(self._children, MIN_REPLICAS, heartbeat_timeout_s=timeout_s, port=old.port)
        self.lighthouse = new
        return replace_lighthouse(old, new, away_s)

    def wait_training(self) -> None:
        """Wait until all groups have committed some steps under one quorum."""
        began_at, ranks = time.monotonic(), [group.rank for group in self.groups.values()]
        wait_until(lambda: self._is_training(began_at), START_TIMEOUT_S, "three groups train", ranks)

    def _is_training(self, since: float) -> bool:
        since = max(since, time.monotonic() - RECENT_S)
        last = [group.commits(since)[-SETTLED_STEPS:] for group in self.groups.values()]
        quorums = {(event.quorum_id, event.size) for events in last for event in events}
        is_one = len({quorum_id for quorum_id, _ in quorums}) == 1 and {size for _, size in quorums} == {len(NAMES)}
        return is_one and all(len(events) == SETTLED_STEPS for events in last)

    def start(self, name: str) -> Group:
        is_torchft = self._product == TORCHFT
        replica_id = f"{name}:{uuid.uuid4()}" if is_torchft else name
        manager = start_manager(self._children, self._product, self.lighthouse, replica_id, store=self._store)
        told = {"manager": manager.address, "name": name, "step_s": STEP_S, "peers": self._peers, "torchft": is_torchft}
        rank = self._children.start(f"rank of {name}", "-m", self._program, json.dumps(told | self._told))
        group = Group(manager, rank)
        threading.Thread(target=group.read_events, daemon=True).start()
        return group


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str, alive: Sequence[Child] = ()) -> None:
    """Wait until `is_true` returns True. Raise TimeoutError, or RuntimeError if one of `alive` has ended."""
    ends_at = time.monotonic() + timeout_s
    while not is_true():
        for child in alive:
            child.check()
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
