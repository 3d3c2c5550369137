"""Who is told how the world is, when, and how often; what the log says of groups that are held back."""

import logging

import pytest

from lighthouse.job.driver import (
    HELD_BACK_LOGGED_AFTER_S,
    SEND_AFTER_S,
    SENT_AT_ONCE,
    Session,
    SessionTable,
    WorldBroadcast,
)
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig
from lighthouse_protocol.messages.membership import MAX_PENDING_NAMED, World
from lighthouse_protocol.messages.session import STARTING
from tests.lighthouse.peers import Listener
from tests.lighthouse.sessions import asks, ended, native, opened, pulse
from tests.virtual_loop import VirtualLoop


class Job:
    """Its driver, as far as the world is concerned."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.machine, self.sessions = loop, QuorumMachine(QuorumConfig()), SessionTable()
        self.worlds = WorldBroadcast("j", self.machine, self.sessions, loop)

    def feed(self, event: object) -> None:
        self.worlds.note_effects(self.machine.handle(event, self.loop.now))  # type: ignore[arg-type]

    def come(self, session: int, name: str, *, size: int = 1, missing: tuple[int, ...] = ()) -> Listener:
        heard, who = Listener(), native(name, group_world_size=size)
        self.sessions[session] = Session(heard, name)
        self.worlds.add_receiver(session)
        self.feed(opened(session, who, down=STARTING if missing else "", missing=frozenset(missing)))
        return heard


@pytest.fixture
def job(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> Job:
    caplog.set_level(logging.INFO)
    return Job(loop)


def test_a_burst_is_told_once(job: Job):
    heard = [job.come(number, f"g{number}") for number in range(1, 4)]
    job.loop.go(1.0)
    assert [one.messages for one in heard] == [[World(3, 3)]] * 3


def test_many_are_told_a_few_at_a_time_and_each_the_newest(job: Job):
    """So that heartbeats need not wait for it; who has been told something older hears once more."""
    size = 3 * SENT_AT_ONCE
    heard = [job.come(number, f"g{number}") for number in range(size)]
    before, after = World(size, size), World(size + 1, size + 1)

    def told() -> int:
        return sum(len(one.messages) for one in heard)

    job.loop.go(1.5 * SEND_AFTER_S)
    assert told() == SENT_AT_ONCE
    last = job.come(size, "last")
    job.loop.go(SEND_AFTER_S)
    assert (told(), last.messages) == (2 * SENT_AT_ONCE, [])
    job.loop.go(10 * SEND_AFTER_S)
    first, later = heard[:SENT_AT_ONCE], heard[SENT_AT_ONCE:]
    assert [one.messages for one in first] == [[before, after]] * len(first)
    assert {one.messages[-1] for one in later} == {after}
    assert last.messages == [after]
    assert told() <= size + 2 * SENT_AT_ONCE
    assert job.loop.timers == 0


def test_of_many_that_ask_to_come_in_the_first_are_named(job: Job, caplog: pytest.LogCaptureFixture):
    heard = job.come(1, "a")
    job.feed(asks(1, 1, "a"))
    names = [f"b{number:02}" for number in range(MAX_PENDING_NAMED + 4)]
    for number, name in enumerate(names, start=2):
        job.come(number, name)
        job.feed(asks(number, number, name))
    job.loop.go(1.0)
    told = heard.messages[-1]
    assert isinstance(told, World)
    assert (told.peers_pending, told.pending) == (len(names), tuple(names[:MAX_PENDING_NAMED]))
    assert caplog.messages == [f"waiting to join: {', '.join(names[:MAX_PENDING_NAMED])} and 4 more"]


def test_a_beat_costs_nothing_and_a_round_of_the_same_members_no_message(job: Job):
    heard = job.come(1, "a")
    job.feed(asks(1, 1, "a"))
    job.loop.go(1.0)
    told = len(heard.messages)
    for number in range(2, 100):
        job.feed(pulse(1, number))
        assert not job.worlds._timer.is_set
    for call in range(2, 5):
        job.feed(asks(call, 1, "a", step=call, commit_failures=1))
        job.loop.go(1.0)
    assert len(heard.messages) == told


def test_who_comes_is_pending_and_then_admitted(job: Job, caplog: pytest.LogCaptureFixture):
    heard = job.come(1, "a")
    job.feed(asks(1, 1, "a"))
    job.come(2, "b")
    job.feed(asks(2, 2, "b"))
    job.loop.go(1.0)
    job.feed(asks(3, 1, "a", step=3, seen_quorum_id=1, tag_quorum_id=1))
    job.loop.go(1.0)
    assert heard.messages == [World(2, 2, peers_pending=1, pending=("b",)), World(2, 2)]
    assert caplog.messages == ["waiting to join: b"]


def test_a_new_session_is_told_though_nothing_has_changed(job: Job):
    first = job.come(1, "a")
    job.loop.go(1.0)
    again = job.come(2, "a")
    job.loop.go(1.0)
    assert (first.messages, again.messages) == ([World(1, 1)], [World(1, 1)])


def test_who_has_gone_is_told_nothing(job: Job):
    heard = job.come(1, "a")
    del job.sessions[1]
    job.feed(ended(1))
    job.loop.go(1.0)
    assert heard.messages == []


def test_a_group_that_stays_incomplete_is_in_the_log_with_its_missing_ranks(job: Job, caplog: pytest.LogCaptureFixture):
    job.come(1, "a", size=8, missing=(4, 5, 6, 7))
    job.come(2, "b", size=8, missing=(0, 1, 2, 3))
    job.loop.go(HELD_BACK_LOGGED_AFTER_S - 1)
    assert caplog.messages == []
    job.loop.go(2)
    assert caplog.messages == [
        "a has ranks 0-3 of 8; missing: 4-7; b has ranks 4-7 of 8; missing: 0-3; "
        "a replica group joins only when all its ranks are connected"
    ]
    for session, name in enumerate("ab", start=1):
        job.feed(asks(session, session, native(name, group_world_size=8)))
    job.loop.go(1)
    assert caplog.messages[1:] == ["all replica groups are complete"]


def test_what_is_waited_for_is_told_once_and_its_end(job: Job):
    heard = job.come(1, "a")
    job.loop.go(1.0)
    for waiting_for in ("b", "b", ""):
        job.worlds.set_waiting_for(waiting_for)
        job.loop.go(1.0)
    assert heard.messages == [World(1, 1), World(1, 1, waiting_for="b"), World(1, 1)]
    job.worlds.set_waiting_for("b")
    job.worlds.set_waiting_for("")
    job.loop.go(1.0)
    assert len(heard.messages) == 3, "it was over before it was told"


def test_a_job_that_ends_leaves_no_timer(job: Job):
    job.come(1, "a", size=2, missing=(1,))
    job.loop.go(1)
    job.come(2, "b")
    assert job.loop.timers == 2
    job.worlds.close()
    assert job.loop.timers == 0
