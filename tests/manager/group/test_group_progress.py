"""A manager's ranks by their watches: whose sample counts, who is lost, and what the log says."""

import logging

import pytest

from lighthouse_protocol.messages.membership import Assignment, Participant
from lighthouse_protocol.messages.progress import Collective, OpenPhase, PhaseTime, ProgressSample
from lighthouse_protocol.rules.stall import Limits
from lighthouse_runtime.timing.timers import LoopLag
from manager.group.driver import GroupProgressDriver, Watch
from tests.manager.recorders import watch
from tests.virtual_loop import VirtualLoop

KNOWN = (PhaseTime("step", 1, 1.0, 1.0), PhaseTime("validation", 1, 1.0, 1.0))
VALIDATES = ProgressSample(9, (OpenPhase("step"), OpenPhase("validation", 3, 25)), (("validation", 1),), times=KNOWN)
REDUCES = ProgressSample(9, collective=Collective(4, 17, "all_reduce", within_group=True), times=KNOWN)


class Group:
    """Of two ranks in one quorum with `groups` others."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.places = GroupProgressDriver(
            Participant("a", group_world_size=2), Limits(), self.loop, lambda: "i", LoopLag(self.loop)
        )
        self.rank_0, self.rank_1 = self.open(0, "w0"), self.open(1, "w1")

    def open(self, rank: int, rank_incarnation: str) -> Watch:
        opened = watch(rank, rank_incarnation=rank_incarnation, pid=70 + rank, hostname=f"host-{rank}")
        if rank_incarnation == "w1-again":
            self.rank_1.is_newest = False
        return opened

    def shown(self) -> list[tuple[str, str, int]]:
        return [(str(rank.name), rank.host, rank.pid) for rank in self.places.view(self.loop.now).ranks]


@pytest.fixture
def group(caplog: pytest.LogCaptureFixture) -> Group:
    caplog.set_level(logging.INFO)
    return Group()


def test_a_lost_rank_is_gone_and_an_old_watch_says_nothing_of_a_new_one(group: Group):
    assert group.shown() == []
    group.places.add_sample(group.rank_1, REDUCES)
    assert group.shown() == [("a/1", "host-1", 71)]
    again = group.open(1, "w1-again")
    group.places.add_sample(group.rank_1, VALIDATES)
    assert group.places.view(group.loop.now).ranks[0].sample.collective is not None
    group.places.add_sample(again, VALIDATES)
    group.places.add_sample(group.rank_1, REDUCES)
    group.places.remove_watch(group.rank_1)
    [rank] = group.places.view(group.loop.now).ranks
    assert (rank.rank_incarnation, rank.sample.collective) == ("w1-again", None)
    group.places.remove_watch(again)
    assert group.shown() == []


def test_a_manager_that_was_held_up_takes_no_rank_for_older(group: Group, caplog: pytest.LogCaptureFixture):
    group.places.add_sample(group.rank_0, REDUCES)
    group.places.add_sample(group.rank_1, VALIDATES)
    group.loop.now += 300
    group.places.handle_pause(300)
    group.loop.go(0)
    assert caplog.messages == []
    assert [rank.beat_age_s for rank in group.places.view(group.loop.now).ranks] == [0, 0]


def test_the_log_says_who_is_behind(group: Group, caplog: pytest.LogCaptureFixture):
    group.places.add_sample(group.rank_0, REDUCES)
    group.places.add_sample(group.rank_1, VALIDATES)
    group.loop.go(58)
    assert caplog.messages == []
    group.loop.go(4)
    [said] = caplog.messages
    assert "a/1 behind in validation 3/25, a/0 waiting in all_reduce; no heartbeat from a/0-1" in said
    group.places.add_sample(group.rank_1, VALIDATES)
    group.loop.go(2)
    assert caplog.messages[1:] == ["progress resumed"]


def test_whoever_waits_for_other_groups_is_not_judged_here(group: Group, caplog: pytest.LogCaptureFixture):
    over_groups = ProgressSample(9, collective=Collective(4, 18, "all_reduce"), times=KNOWN)
    group.places.add_sample(group.rank_0, over_groups)
    group.loop.go(300)  # rank 1 has not said where it is
    group.places.add_sample(group.rank_1, over_groups)
    group.loop.go(300)
    assert caplog.messages == []
    group.places.record_assignment(Assignment(1, 0, 1, ("a",), "", 0, None, 1, 1, ""))
    group.loop.go(60)
    assert "network or collective: a/0-1 in all_reduce, no rank behind" in caplog.messages[0]
    group.places.close()
    assert group.loop.timers == 0


def test_a_group_that_is_stuck_in_itself_is(group: Group, caplog: pytest.LogCaptureFixture):
    group.places.add_sample(group.rank_0, REDUCES)
    group.places.add_sample(group.rank_1, REDUCES)
    group.loop.go(125)
    assert "network or collective: a/0-1 in all_reduce, no rank behind" in caplog.messages[0]
