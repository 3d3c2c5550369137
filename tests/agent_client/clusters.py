"""Real training to kill and to start again: tests.agent_client.local_cluster, and what its ranks have logged so far."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from tests.agent_client import local_cluster
from tests.agent_client.local_cluster import ForkServer, Group, LocalCluster
from tests.agent_client.ranks import WITHOUT_DNS
from tests.processes import PATIENCE_S, eventually

# How long a group that has nothing to say is waited for. A killed one is missed for no longer than the first, if its
# manager lives, or the second.
TIMES = ("--join-timeout", "2s", "--heartbeat-timeout", "3s")
RECOVERS_WITHIN_S = 2 * PATIENCE_S

Event = dict[str, Any]


class Cluster(LocalCluster):
    """Borrows a running fork server; what it started is killed at its end. A group is `started` when its manager is."""

    def __init__(
        self,
        forks: ForkServer,
        folder: Path,
        *,
        groups: int,
        ranks: int,
        pace_s: float,
        script: Path = local_cluster.TRAIN_SCRIPT,
        steps: int = 1_000_000,
        min_replicas: int = 1,
    ) -> None:
        with mock.patch.object(local_cluster, "ForkServer", return_value=forks):
            super().__init__(
                folder,
                groups=groups,
                ranks=ranks,
                train_arguments=["--steps", str(steps), "--pace", str(pace_s)],
                lighthouse_arguments=[*TIMES, "--min-replicas", str(min_replicas)],
                script=script,
            )

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        pids = [pid for group in self.groups for pid in (*group.pids, group.store_pid) if pid is not None]
        for group in self.groups:
            self.kill_ranks(group)
            self.kill_manager(group)
        self.lighthouse.kill()
        self.wait_gone(*pids)

    def start_lighthouse(self) -> None:
        self.lighthouse.start()
        self.lighthouse.wait_port(self._port)

    def start_groups(self, *groups: Group) -> None:
        """Managers, stores and ranks of those that do not run."""
        idle = [group for group in groups if not group.manager.is_alive]
        for group in idle:
            self.begin_manager(group)
        for group in idle:
            group.manager.wait_port(group.manager_port)
        for group in groups:
            if not group.pids:
                self.start_ranks(group)

    def kill(self, group: Group, *, with_manager: bool = False) -> None:
        """SIGKILL to all its ranks; returns when they are gone."""
        pids = list(group.pids)
        if with_manager:
            self.kill_manager(group)
        self.kill_ranks(group)
        self.wait_gone(*pids)

    def wait_gone(self, *pids: int) -> None:
        eventually(lambda: all(pid in self.forks.ended for pid in pids), f"{pids} have ended")

    def check_alive(self) -> None:
        """Every rank that was not killed runs."""
        for group in self.groups:
            for rank, pid in enumerate(group.pids):
                status = self.forks.ended.get(pid)
                assert status is None, f"{group.name} rank {rank} ended with {status}:\n{self.log(group, rank)}"

    def log(self, group: Group, rank: int) -> str:
        """Its last words, over all its starts."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.output(group, rank).read_text(errors="replace").splitlines()[-30:])
        return ""

    # -- what was trained

    def committed(self, group: Group, rank: int = 0) -> list[Event]:
        """The steps of its present start."""
        return [event for event in read_events(self.events(group, rank)) if "step" in event]

    def wait_steps(self, *groups: Group, more: int, participants: int) -> None:
        """Until each rank of `groups` has committed so many more steps in quorums of that size."""
        ranks = list(itertools.product(groups, range(self.ranks)))
        before = {(group.name, rank): len(self.committed(group, rank)) for group, rank in ranks}

        def is_done() -> bool:
            self.check_alive()
            for group, rank in ranks:
                new = self.committed(group, rank)[before[group.name, rank] :]
                if sum(event["participants"] == participants for event in new) < more:
                    return False
            return True

        try:
            eventually(is_done, f"{more} more steps of {participants} groups", RECOVERS_WITHIN_S)
        except AssertionError as e:
            logs = "\n".join(f"-- {group.name} rank {rank}:\n{self.log(group, rank)}" for group, rank in ranks)
            raise AssertionError(f"{e}\n{logs}") from None


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


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[ForkServer]:
    with mock.patch.dict(os.environ, WITHOUT_DNS):
        server = ForkServer(folder / "fork-server.log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
