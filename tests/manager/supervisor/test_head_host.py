"""Host 0 of a group, without a manager, a guard and ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manager.group.events import RankGivenUp
from manager.server.config import ManagerConfig
from manager.supervisor.config import SupervisorConfig
from manager.supervisor.head_host import HeadHost
from manager.supervisor.local_host import Launch
from manager.supervisor.rules.events import HostReady, RankEnded


class Local:
    """Records which ranks receive SIGTERM, and how long before SIGKILL."""

    plan = SimpleNamespace(torchrun=None)

    def __init__(self) -> None:
        self.halted: list[tuple[int, ...]] = []

    def start(self, ranks: Sequence[int], attempt: int, unit: str) -> None:
        pass

    def halt(self, ranks: Sequence[int], grace_s: float) -> None:
        self.halted.append((*ranks, int(grace_s)))


def started(monkeypatch: pytest.MonkeyPatch, **preemption: Any) -> tuple[HeadHost, Local]:
    """Two ranks run."""
    launch = Launch(ManagerConfig("127.0.0.1:1", "a"), SupervisorConfig(nproc_per_node=2), ("true",), None)
    head, local = HeadHost(launch, cast(Any, None)), Local()
    group = SimpleNamespace(has_ranks=True, ranks_started=lambda ranks: None)
    monkeypatch.setattr(head, "_local", local)
    monkeypatch.setattr(head, "_daemon", SimpleNamespace(group=group))
    monkeypatch.setattr(head, "_preemption", SimpleNamespace(**preemption) if preemption else None)
    head.feed(HostReady(0))
    return head, local


@pytest.mark.parametrize("is_started", [True, False])
async def test_a_loss_from_before_a_restart_does_not_end_the_new_process(
    monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    """The manager's clock also counts a suspension of the machine, and its times of losses grow by its own pauses."""
    head, local = started(monkeypatch)
    head.handle(RankGivenUp(1, "rank 1 has ended", lost_at=1e9, has_left=False, is_started=is_started))
    assert local.halted == ([] if is_started else [(0, 1, 10)])


@pytest.mark.parametrize(("save_left_s", "is_cut"), [(60.0, False), (0.0, True)])
async def test_a_rank_that_fails_after_its_last_save_does_not_cut_those_of_the_others(
    monkeypatch: pytest.MonkeyPatch, save_left_s: float, is_cut: bool
) -> None:
    """After a notice and a drain, the ranks save as long as their host has time, not --termination-grace."""
    head, local = started(monkeypatch, save_left_s=save_left_s, exit_left_s=50.0, is_draining=True)
    head._handle_manager_exit(0)  # pyright: ignore[reportPrivateUsage]
    head.feed(RankEnded(1, 0, -11))
    assert local.halted == ([(0, 1, 50)] if is_cut else [])
    head.feed(RankEnded(0, 0, 0))
    over = head._over.result()  # pyright: ignore[reportPrivateUsage]
    assert (over.status, over.why) == (143, "preempted; the group has left its quorum")
