"""torchft's own Python trains on our lighthouse and managers: processes, gloo, kill -9, heal, equal weights."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_client.ranks import Pending, Rank, RankEnded, RankServer
from tests.processes import Lighthouse, eventually
from tests.torchft.stock import require

MOVED = "tests.agent_client.torchft.installed:Trainer"
STOCK = "tests.agent_client.torchft.trainers:Trainer"
# More steps than the groups make while they are told, one after the other, where to stop.
FINISHES_AFTER = 50


class Group:
    """A replica group that can be started again, and all that it has committed."""

    def __init__(self, server: RankServer, name: str, lighthouse: str, folder: Path) -> None:
        self.name = name
        self._server = server
        self._lighthouse = lighthouse
        self._log = folder / f"{name}.log"
        self._earlier: list[dict[str, Any]] = []
        self._rank: Rank
        self._training: Pending

    def start(self, trainer: str = MOVED) -> None:
        self._rank = self._server.start(trainer, self._log)
        self._training = self._rank.begin("train", self.name, self._lighthouse)

    def commits(self) -> list[dict[str, Any]]:
        """In all its lives."""
        return self._earlier + self._now()

    def in_this_life(self, participants: int, least: int = 3) -> None:
        """Return when this life has committed so many steps with so many participants."""

        def look() -> bool:
            assert not self._training.is_done(), self._training.result()
            return len([c for c in self._now() if c["participants"] == participants]) >= least

        try:
            eventually(look, f"{least} commits of {self.name} with {participants} participants")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self._now()[-3:]}\n{self.log()[-4000:]}") from None

    def kill(self) -> None:
        self._earlier += self._now()
        self._rank.kill()

    def die(self, where: str) -> None:
        """By SIGKILL; "in a sum" what the others have summed of the step is void."""
        self._earlier += self._now()
        self._rank.begin("die", where)
        eventually(self._has_ended, f"{self.name} has died")

    def _has_ended(self) -> bool:
        try:
            return self._training.is_done(0.01)
        except RankEnded:
            return True

    def finish_at(self, step: int) -> None:
        self._rank.call("finish_at", step)

    def finished(self) -> dict[str, Any]:
        """Its last commit."""
        self._training.result()
        return dict(self._now()[-1])

    def is_moved(self) -> bool:
        module: str = self._rank.call("control_plane")
        assert module in ("builtins", "agent_client.torchft.servers")
        return module != "builtins"

    def log(self) -> str:
        return self._log.read_text()

    def _now(self) -> list[dict[str, Any]]:
        commits: list[dict[str, Any]] = self._rank.call("commits")
        return commits


@contextlib.contextmanager
def groups_of(
    rank_server: RankServer, folder: Path, heartbeat_timeout: str = "600s", trainer: str = MOVED
) -> Generator[tuple[Group, Group, Group]]:
    """Three. Whoever dies is missed at once, or the tests would wait for the heartbeat timeout."""
    require()
    times = ("--heartbeat-timeout", heartbeat_timeout, "--join-timeout", "600s")
    with Lighthouse("--min-replicas", "2", *times) as lighthouse:
        groups = tuple(
            Group(rank_server, name, f"http://{lighthouse.address}", folder) for name in ("a_0", "b_1", "c_2")
        )
        started = []
        try:
            for group in groups:
                group.start(trainer)
                started.append(group)
            yield groups  # type: ignore[misc]  # three names, three groups
        finally:
            for group in started:
                group.kill()


def finish(*groups: Group) -> list[dict[str, Any]]:
    """Let them train to one step; the last commit of each."""
    last = max(group.commits()[-1]["step"] for group in groups) + FINISHES_AFTER
    for group in groups:
        group.finish_at(last)
    return [group.finished() for group in groups]


def differing_steps(*groups: Group) -> dict[int, set[str]]:
    """Steps after which two groups had different weights."""
    found: dict[int, set[str]] = {}
    for commit in [commit for group in groups for commit in group.commits()]:
        found.setdefault(commit["step"], set()).add(commit["weights"])
    return {step: weights for step, weights in found.items() if len(weights) > 1}


def test_groups_are_bit_identical_after_a_kill_and_a_heal(rank_server: RankServer, tmp_path: Path) -> None:
    """The kill is in the middle of a step, where torchft's own DistributedDataParallel would end the others, too.
    LocalSGD and DiLoCo are in torchft's own tests: test_their_own.py."""
    with groups_of(rank_server, tmp_path) as (a, b, c):
        for group in (a, b, c):
            group.in_this_life(participants=3)
        c.die("in a sum")
        for group in (a, b):
            group.in_this_life(participants=2)
        c.start()
        c.in_this_life(participants=3)
        ends = finish(a, b, c)
        assert ends == [ends[0]] * 3
        assert ends[0]["participants"] == 3
        assert differing_steps(a, b, c) == {}


@pytest.mark.slow
def test_a_job_is_moved_group_by_group(rank_server: RankServer, tmp_path: Path) -> None:
    """torchft's own managers and ours in one quorum, each healing from the other; its deaths are seen by silence."""
    with groups_of(rank_server, tmp_path, heartbeat_timeout="5s", trainer=STOCK) as groups:
        for group in groups:
            group.in_this_life(participants=3)
        assert [group.is_moved() for group in groups] == [False] * 3
        for group in groups:
            group.die("between steps")  # torchft's own survivors would not outlive another moment
            group.start(MOVED)
            group.in_this_life(participants=3)
        assert [group.is_moved() for group in groups] == [True] * 3
        ends = finish(*groups)
        assert ends == [ends[0]] * 3
        assert differing_steps(*groups) == {}
