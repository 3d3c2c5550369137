"""The examples' training under real daemons on loopback, to kill and to start again, and what its ranks have logged."""

import contextlib
import functools
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from examples.daemons import ROOT, Daemon, command, lighthouse
from examples.ports import LOOPBACK, free_port
from tests.agent_client.ranks import Rank, RankServer, state_of
from tests.processes import PATIENCE_S, eventually

TRAIN_SCRIPT = ROOT / "examples" / "train_ddp.py"
# How long a group that has nothing to say is waited for. A killed one is missed for no longer than the first, if its
# manager lives, or the second.
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s")
RECOVERS_WITHIN_S = 2 * PATIENCE_S

Event = dict[str, Any]


PRELOADED = (
    "sklearn.datasets",
    "agent_client.training.ddp",
    "agent_client.training.local_sgd",
    "agent_client.training.hsdp",
    "agent_client.training.optimizer",
    "agent_client.training.sampler",
)
"""What the examples' scripts import."""


@dataclass(slots=True)
class Group:
    """One replica group: its manager and store, its ranks' processes, and how often it was started."""

    name: str
    manager: Daemon
    manager_port: int
    store_port: int
    store: Rank | None = None
    ranks: list[Rank] = field(default_factory=list)
    starts: int = 0


class Cluster:
    """Borrows a RankServer that has imported PRELOADED; what it started is killed at its end."""

    def __init__(
        self,
        forks: RankServer,
        folder: Path,
        *,
        groups: int,
        ranks: int,
        pace_s: float,
        script: Path = TRAIN_SCRIPT,
        arguments: Sequence[str] = (),
        steps: int = 1_000_000,
        min_replicas: int = 1,
    ) -> None:
        """`folder` takes logs and events. `arguments` are the script's, before those that all scripts take."""
        self.forks = forks
        self.folder = folder
        self.ranks = ranks
        self._arguments = [*arguments, "--steps", str(steps), "--pace", str(pace_s)]
        self._script = script
        self._port = free_port()
        self.lighthouse_address = f"{LOOPBACK}:{self._port}"
        options = [*TIMES, "--min-replicas", str(min_replicas)]
        self.lighthouse = lighthouse(folder, self.lighthouse_address, options)
        self.groups = [self._group(f"group-{number}") for number in range(groups)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            self.kill(group, with_manager=True)
        self.lighthouse.kill()

    def start_lighthouse(self) -> None:
        self.lighthouse.start()
        self.lighthouse.wait_port(self._port)

    def start_groups(self, *groups: Group) -> None:
        """Managers, stores and ranks of those that do not run; managers and stores on the ports they always have."""
        idle = [group for group in groups if not group.manager.is_alive]
        for group in idle:
            group.store = self.forks.start("tests.agent_client.actors:StoreActor")
            group.store.call("serve", group.store_port)
            group.manager.start()
        for group in idle:
            group.manager.wait_port(group.manager_port)
        for group in groups:
            if not group.ranks:
                self.start_ranks(group)

    def start_ranks(self, group: Group) -> None:
        master_port = str(free_port())
        group.starts += 1
        for rank in range(self.ranks):
            environment = {
                "LIGHTHOUSE_MANAGER_ADDRESS": f"{LOOPBACK}:{group.manager_port}",
                "LIGHTHOUSE_MANAGER_ADVERTISE": LOOPBACK,
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": master_port,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
            }
            arguments = [*self._arguments, "--events", str(self.events(group, rank))]
            group.ranks.append(self.forks.run(self._script, arguments, environment, self.output(group, rank)))

    def kill(self, group: Group, *, with_manager: bool = False) -> None:
        """SIGKILL to all its ranks at once; returns when they are gone."""
        if with_manager:
            self.kill_manager(group)
        for rank in group.ranks:
            rank.signal(signal.SIGKILL)
        for rank in group.ranks:
            rank.kill()
        group.ranks = []

    def kill_manager(self, group: Group) -> None:
        """SIGKILL, to its store too."""
        group.manager.kill()
        if group.store is not None:
            group.store.kill()
            group.store = None

    def has_ended(self, group: Group) -> bool:
        return None not in self.statuses(group)

    def wait_ended(self, within_s: float = 300.0) -> str:
        """Until all ranks have ended, and well. Their last words."""
        eventually(lambda: all(map(self.has_ended, self.groups)), "all have ended", within_s)
        logs = "\n".join(self.log(group, 0) for group in self.groups)
        assert [self.statuses(group) for group in self.groups] == [[0] * self.ranks] * len(self.groups), logs
        return logs

    def statuses(self, group: Group) -> list[int | None]:
        """Of the present ranks; None while one runs."""
        return [rank.status for rank in group.ranks]

    def check_alive(self) -> None:
        """Every rank that was not killed runs."""
        for group in self.groups:
            for rank, status in enumerate(self.statuses(group)):
                assert status is None, f"{group.name} rank {rank} ended with {status}:\n{self.log(group, rank)}"

    def output(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}.log"

    def events(self, group: Group, rank: int) -> Path:
        return self.folder / f"{group.name}-rank-{rank}-start-{group.starts}.jsonl"

    def log(self, group: Group, rank: int) -> str:
        """Its last words, over all its starts."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.output(group, rank).read_text(errors="replace").splitlines()[-30:])
        return ""

    def _group(self, name: str) -> Group:
        port, store_port = free_port(), free_port()
        arguments = [
            *("serve", "--lighthouse", self.lighthouse_address, "--replica-id", name),
            *("--group-world-size", str(self.ranks), "--bind", f"{LOOPBACK}:{port}"),
            *("--advertise", LOOPBACK, "--store", f"{LOOPBACK}:{store_port}"),
        ]
        manager = Daemon(f"manager of {name}", command("manager", arguments), self.folder / f"{name}-manager.log")
        return Group(name, manager, port, store_port)

    # -- what was trained

    def committed(self, group: Group, rank: int = 0) -> list[Event]:
        """The steps of its present start."""
        return [event for event in read_events(self.events(group, rank)) if "step" in event]

    def wait_steps(self, *groups: Group, more: int, participants: int) -> None:
        """Until each rank of `groups` has committed so many more steps in quorums of that size."""
        ranks = list(itertools.product(groups, range(self.ranks)))
        try:
            wait_more(
                [functools.partial(self.committed, *at) for at in ranks], more, participants, check=self.check_alive
            )
        except AssertionError as e:
            logs = "\n".join(f"-- {group.name} rank {rank}:\n{self.log(group, rank)}" for group, rank in ranks)
            raise AssertionError(f"{e}\n{logs}") from None


def wait_more(
    committed: Sequence[Callable[[], list[Event]]], more: int, participants: int, *, check: Callable[[], None]
) -> None:
    """Until each of these has so many more events of steps with so many participants."""
    before = [len(events()) for events in committed]

    def is_done() -> bool:
        check()
        new = [events()[count:] for events, count in zip(committed, before, strict=True)]
        return all(sum(event["participants"] == participants for event in events) >= more for events in new)

    eventually(is_done, f"{more} more steps of {participants} groups", RECOVERS_WITHIN_S)


def read_events(path: Path) -> list[Event]:
    """A rank that was killed while it wrote leaves half a line at the end."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def all_events(folder: Path, rank: str = "*") -> Iterator[list[Event]]:
    """The committed steps of every start of every rank, or of the one of that number in each group."""
    for path in sorted(folder.glob(f"*-rank-{rank}-start-*.jsonl")):
        yield [event for event in read_events(path) if "step" in event]


def check_heals(cluster: Cluster, steps: int, accuracy: float, *, before: int, within_s: float) -> None:
    """A group is killed `before` steps from here, started again, heals, and all end alike, having learnt.

    The other one waits for it, so that it finds somebody to heal from however long its start takes.
    """
    cluster.start_lighthouse()
    cluster.start_groups(*cluster.groups)
    cluster.wait_steps(*cluster.groups, more=before, participants=2)
    victim, survivor = cluster.groups
    cluster.kill(victim)
    step = cluster.committed(survivor)[-1]["step"]
    cluster.start_groups(victim)
    cluster.wait_ended(within_s)
    assert cluster.committed(victim)[0]["step"] > step
    for rank in range(cluster.ranks):  # ranks may hold different shards, or buffers until the next forward pass
        ends = [read_events(cluster.events(group, rank))[-1] for group in cluster.groups]
        assert check_all(cluster.folder, str(rank)) > steps / 2
        assert {end["finished"] for end in ends} == {steps}
        assert len({end["hash"] for end in ends}) == 1
        assert all(end["accuracy"] > accuracy for end in ends), ends


def check_all(folder: Path, rank: str = "*") -> int:
    """Nobody who committed the same step under the same quorum has other weights. How many were compared.

    Where the ranks of a group hold different shards, one `rank` at a time.

    A step may be committed under two quorums: by somebody who died with it, and again by those who had lost it.
    """
    found: dict[tuple[int, int], tuple[str, int]] = {}
    compared = 0
    for events in all_events(folder, rank):
        steps = [event["step"] for event in events]
        assert steps == sorted(set(steps)), "a rank goes forward, one step once"
        for event in events:
            key, value = (event["step"], event["quorum_id"]), (event["hash"], event["participants"])
            compared += key in found
            assert found.setdefault(key, value) == value, f"weights or members differ at step and quorum {key}"
    return compared


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return state_of(pid) not in ("", "Z")


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
