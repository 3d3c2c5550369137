"""A job's ranks on the lighthouse's loop: whose view counts, who is judged, what the log says."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lighthouse.job.incident_driver import ProgressDriver
from lighthouse_protocol.messages.progress import GroupView
from tests.lighthouse_protocol.views import after, all_reduce, rank
from tests.virtual_loop import VirtualLoop


@dataclass
class Member:
    replica_id: str
    in_quorum: bool = True
    is_alive: bool = True


@dataclass
class Roster:
    """As far as it is asked here."""

    members: dict[str, Member] = field(default_factory=lambda: {name: Member(name) for name in "ab"})

    def __iter__(self):
        return iter(self.members.values())

    def participants(self) -> list[Member]:
        return [member for member in self if member.in_quorum]

    def get(self, name: str) -> Member | None:
        return self.members.get(name)


class Job:
    """Rank b/1 has not come into the collective in which all others wait."""

    def __init__(self, loop: VirtualLoop, check_lag: Callable[[], object] = lambda: None) -> None:
        self.loop, self.roster = loop, Roster()
        self.places = ProgressDriver("j", self.roster, loop, check_lag=check_lag)  # pyright: ignore[reportArgumentType]
        inside = all_reduce(9)
        self.a = GroupView("a", "i", tuple(rank(n, inside=inside, group="a", still_s=0) for n in range(2)))
        late = rank(1, "loader", left=after(all_reduce(8)), group="b", still_s=0)
        self.b = GroupView("b", "i", (rank(0, inside=inside, group="b", still_s=0), late))

    def shown(self) -> list[tuple[str, int, str]]:
        return [(place.replica_id, place.group_rank, place.state.value) for place in self.places.ranks()]


@pytest.fixture
def job(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> Job:
    caplog.set_level(logging.INFO)
    return Job(loop)


def test_the_log_says_who_is_behind_over_groups(job: Job, caplog: pytest.LogCaptureFixture):
    job.places.take("a", job.a)
    job.places.take("b", job.b)
    job.loop.go(59)
    assert (caplog.messages, job.places.verdict()) == ([], None)
    job.loop.go(3)
    [said] = caplog.messages
    assert said.startswith("nothing has moved for 6")
    assert ": b/1 behind in loader, a/0-1, b/0 waiting in all_reduce; no beat from a/0-1, b/0-1" in said
    assert job.shown()[0] == ("b", 1, "behind")
    job.places.take("b", job.b)
    job.loop.go(2)
    assert caplog.messages[1:] == ["progress resumed"]


def test_a_lighthouse_that_was_held_up_judges_nobody_for_that_time(job: Job, caplog: pytest.LogCaptureFixture):
    """What the ranks have said meanwhile is read after the timer has fired."""
    job.places.take("a", job.a)
    job.places.take("b", job.b)
    job.loop.go(30)
    job.loop.now += 1000
    job.places.was_late(1000)
    job.loop.go(0)
    assert (caplog.messages, job.places.verdict()) == ([], None)
    job.loop.go(29)
    assert caplog.messages == []
    job.loop.go(3)
    assert ": b/1 behind in loader" in caplog.text, "it hangs all the same"


def test_it_asks_whether_it_was_before_it_judges(loop: VirtualLoop, caplog: pytest.LogCaptureFixture):
    job = Job(loop, lambda: job.places.was_late(1000) if loop.now > 2000 and not late.append(1) else None)
    late: list[int] = []
    job.places.take("a", job.a)
    job.places.take("b", job.b)
    job.loop.now += 1010
    job.loop.go(0)
    assert late
    assert "nothing has moved" not in caplog.text


def test_a_session_speaks_for_its_own_group(job: Job):
    job.places.take("a", job.b)
    assert job.shown() == []


def test_a_lost_group_is_shown_until_it_is_forgotten(job: Job):
    job.places.take("a", job.a)
    job.places.take("b", job.b)
    job.roster.members["b"].is_alive = job.roster.members["b"].in_quorum = False
    assert [state for *_, state in job.shown()] == ["lost", "lost", "waiting", "waiting"]
    del job.roster.members["b"]
    assert [name for name, *_ in job.shown()] == ["a", "a"]
    job.roster.members.clear()
    job.loop.go(100)
    assert job.loop.timers == 0


def test_close_leaves_no_timer(job: Job):
    job.places.take("a", job.a)
    assert job.loop.timers == 1
    job.places.close()
    assert job.loop.timers == 0
