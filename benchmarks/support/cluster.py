"""Three replica groups that train: a lighthouse, and a manager and a rank each, all of them processes of their own."""

import contextlib
import itertools
import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.all_reduce import Place
from benchmarks.support.children import Child, Children
from benchmarks.support.daemons import (
    HERE,
    OURS_BY_TLS,
    TORCHFT,
    Daemon,
    prepare_lighthouse,
    start_lighthouse,
    start_manager,
)
from benchmarks.support.network import OUR_ADDRESS, THEIR_ADDRESS, SecondHost
from examples.ports import free_port

NAMES = ("a", "b", "c")
STEP_S = 0.02
MIN_REPLICAS = 2
START_TIMEOUT_S = 180.0
SETTLED_STEPS = 5
RECENT_S = 1.0
POLL_S = 0.01
WITHOUT_TORCH = "benchmarks.support.training_rank"


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank tells (training_rank.py); `size` is that of its quorum."""

    at: float
    what: str
    quorum_id: int
    step: int
    size: int


@dataclass(slots=True)
class Group:
    """One start of a replica group. `events` grows on a thread of its own."""

    manager: Daemon
    rank: Child
    events: list[Event] = field(default_factory=list[Event])

    def signal(self, number: int) -> None:
        self.manager.child.signal(number)
        self.rank.signal(number)

    def since(self, at: float) -> list[Event]:
        recent = itertools.takewhile(lambda event: event.at >= at, reversed(self.events))
        return list(recent)[::-1]

    def commits(self, since: float) -> list[Event]:
        return [event for event in self.since(since) if event.what == "commit"]

    def follow(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # its pipe is closed when it is ended
            for line in self.rank.lines():
                self.events.append(Event(*json.loads(line)))


class Cluster:
    """With a second host, group c lives there. `program`: a rank's, with `options` of its own; `store`: a manager's."""

    def __init__(
        self,
        children: Children,
        product: str,
        heartbeat_timeout_s: float,
        second_host: SecondHost | None = None,
        *,
        program: str = WITHOUT_TORCH,
        options: Mapping[str, Any] | None = None,
        store: str = "",
    ) -> None:
        self.product = product
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.second_host = second_host
        self._program = program
        self._options = dict(options or {})
        self._store = store
        self._children = children
        self._host = OUR_ADDRESS if second_host else HERE
        self._peers: dict[str, Place] = {name: (self._host_of(name), free_port()) for name in NAMES}
        self.lighthouse = start_lighthouse(
            children, product, MIN_REPLICAS, heartbeat_timeout_s=heartbeat_timeout_s, host=self._host
        )
        self.groups = {name: self._start(name) for name in NAMES}
        self.wait_training()

    def replace(self, name: str) -> None:
        """End what is left of a group and start it anew; returns when all train."""
        self.groups[name].manager.child.end()
        self.groups[name].rank.end()
        if self.second_host is not None:
            self.second_host.plug()
        self.groups[name] = self._start(name)
        self.wait_training()

    def kill_lighthouse(self, away_s: float) -> float:
        """When that was. Ours; another one takes its place so long after that."""
        old, timeout_s = self.lighthouse, self.heartbeat_timeout_s
        self.lighthouse = prepare_lighthouse(
            self._children,
            MIN_REPLICAS,
            heartbeat_timeout_s=timeout_s,
            host=self._host,
            port=old.port,
            has_tls=self.product == OURS_BY_TLS,
        )
        killed_at = time.monotonic()
        old.child.end()
        time.sleep(away_s)
        self.lighthouse.serve()
        return killed_at

    def wait_training(self) -> None:
        """All groups have committed some steps under one quorum of all."""
        began_at = time.monotonic()
        wait_until(lambda: self._is_training(began_at), START_TIMEOUT_S, "three groups train")

    def _is_training(self, since: float) -> bool:
        for group in self.groups.values():
            group.rank.check()
        since = max(since, time.monotonic() - RECENT_S)
        last = [group.commits(since)[-SETTLED_STEPS:] for group in self.groups.values()]
        quorums = {(event.quorum_id, event.size) for events in last for event in events}
        is_one = len({quorum_id for quorum_id, _ in quorums}) == 1 and {size for _, size in quorums} == {len(NAMES)}
        return is_one and all(len(events) == SETTLED_STEPS for events in last)

    def _host_of(self, name: str) -> str:
        return THEIR_ADDRESS if self.second_host and name == NAMES[-1] else self._host

    def _start(self, name: str) -> Group:
        is_torchft = self.product == TORCHFT
        host = self._host_of(name)
        within = self.second_host.within if self.second_host and host == THEIR_ADDRESS else ()
        replica_id = f"{name}:{uuid.uuid4()}" if is_torchft else name
        manager = start_manager(
            self._children, self.product, self.lighthouse, replica_id, host=host, within=within, store=self._store
        )
        told = {"manager": manager.address, "name": name, "step_s": STEP_S, "peers": self._peers, "torchft": is_torchft}
        program = ["-m", self._program, json.dumps(told | self._options)]
        group = Group(manager, self._children.start(f"rank of {name}", *program, within=within))
        group.follow()
        return group


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
    ends_at = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def kill_group(cluster: Cluster, name: str) -> None:
    cluster.groups[name].signal(signal.SIGKILL)


def kill_rank(cluster: Cluster, name: str) -> None:
    cluster.groups[name].rank.signal(signal.SIGKILL)


def stop_group(cluster: Cluster, name: str) -> None:
    cluster.groups[name].signal(signal.SIGSTOP)


def pull_cable(cluster: Cluster, name: str) -> None:
    """Group c's, whoever is named."""
    assert cluster.second_host is not None
    cluster.second_host.pull()
