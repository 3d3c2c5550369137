"""The timeline of a job: what becomes an entry, and which entries are kept."""

from lighthouse.job.events import QuorumEvent
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import QuorumConfig
from lighthouse.job.status import NAMES, Timeline, TimelineWriter
from lighthouse_protocol.messages.progress import RankName
from lighthouse_protocol.messages.session import STARTING
from lighthouse_protocol.messages.status import TimelineEntry, TimelineKind
from lighthouse_protocol.rules.stall import Kind, StallVerdict
from tests.lighthouse.sessions import asks, held, left, lose, native, opened, pulse

JOINED, LOST = TimelineKind.JOINED, TimelineKind.LOST


def test_what_happens_alike_in_one_moment_is_one_entry():
    timeline = Timeline()
    timeline.add_entry(10.0, JOINED, ("a",))
    timeline.add_entry(10.5, JOINED, ("b",))
    timeline.add_entry(10.6, LOST, ("a",), "it fell silent")
    timeline.add_entry(10.7, LOST, ("b",), "has restarted")
    timeline.add_entry(12.0, LOST, ("c",), "has restarted")
    assert timeline.entries == (
        TimelineEntry(10.0, JOINED, ("a", "b"), 0, ""),
        TimelineEntry(10.6, LOST, ("a",), 0, "it fell silent"),
        TimelineEntry(10.7, LOST, ("b",), 0, "has restarted"),
        TimelineEntry(12.0, LOST, ("c",), 0, "has restarted"),
    )


def test_a_thousand_that_come_are_one_entry_with_the_first_names():
    timeline = Timeline()
    for number in range(1000):
        timeline.add_entry(0.0005 * number, JOINED, (f"g{number}",))
    [entry] = timeline.entries
    assert entry.replica_ids == tuple(f"g{number}" for number in range(NAMES))
    assert entry.more == 1000 - NAMES


def test_entries_about_nobody_stay_apart():
    timeline = Timeline()
    timeline.add_entry(0.0, TimelineKind.MOVES, (), "progress resumed")
    timeline.add_entry(0.0, TimelineKind.MOVES, (), "progress resumed")
    assert len(timeline.entries) == 2


def test_the_newest_are_kept():
    timeline = Timeline(limit=3)
    for moment in range(0, 10, 2):
        timeline.add_entry(moment, JOINED, (f"g{moment}",))
    assert [entry.replica_ids for entry in timeline.entries] == [("g4",), ("g6",), ("g8",)]


WALL = 1000.0


class Job:
    """A machine with its timeline; wall time is `WALL` ahead, in seconds."""

    def __init__(self, **config: object) -> None:
        self.machine = QuorumMachine(QuorumConfig(**config))
        self.history = TimelineWriter(self.machine.job)
        self.read = 0

    def handle(self, event: QuorumEvent, now: float) -> None:
        self.history.add_effects(self.machine.handle(event, now), WALL + now)

    def lose(self, session: int, now: float) -> None:
        self.history.add_effects(lose(self.machine, session, now), WALL + now)

    def beat(self, session: int, name: str, now: float, **levels: object) -> None:
        self.handle(pulse(session, **levels), now)
        self.history.check_heal(name, WALL + now)

    def new(self) -> list[str]:
        """What was noted since, in words: a moment, a kind, who, what."""
        entries = self.history.entries
        fresh, self.read = entries[self.read :], len(entries)
        return [f"{e.at_unix_s - WALL:g} {e.kind} {''.join(e.replica_ids)} {e.text}".rstrip() for e in fresh]


def at_work(steps: dict[str, int], **fields: object) -> Job:
    """Sessions and calls 1, 2, ... hold quorum 1, which stands."""
    job = Job()
    groups = [native(name, step, **fields) for name, step in steps.items()]
    for number, who in enumerate(groups, start=1):
        job.handle(opened(number, who), 0)
    for number, who in enumerate(groups, start=1):
        job.handle(asks(number, number, who), 0)
    return job


def test_who_comes_is_lost_comes_back_drains_and_leaves():
    job = at_work({"a": 0, "b": 0})
    assert job.new() == ["0 joined ab", "0 quorum ab quorum 1: 2 participants at step 0"]
    job.lose(2, 1)
    job.handle(opened(3, "b"), 2)
    job.handle(asks(9, 3, native("b", incarnation="i2")), 3)
    for now in (3.5, 4):
        job.beat(3, "b", now, drains=True)
    job.handle(left(3), 4.5)
    assert job.new() == [
        "1 lost b its connection was lost",
        "2 joined b is back",
        "3 lost b its ranks have restarted",
        "3 joined b",
        "3.5 drained b",
        "4.5 left b",
    ]


def test_ranks_that_restart_are_a_loss_and_those_that_never_came_are_none():
    job = at_work({"a": 0, "b": 0})
    job.new()
    job.beat(2, "b", 1, down="rank 1 has died")
    job.handle(opened(3, "c"), 2)
    job.beat(3, "c", 3, down=STARTING)
    assert job.new() == ["1 lost b rank 1 has died", "2 joined c"]
    job.handle(asks(9, 2, "b"), 5)
    assert job.new()[0] == "5 joined b all its ranks are connected"


def test_who_is_behind_heals_until_it_works_on_a_later_step():
    job = at_work({"a": 7, "b": 3})
    assert job.new()[1:] == ["0 quorum ab quorum 1: 2 participants at step 7", "0 healing b from step 3 to 7"]
    job.beat(2, "b", 1, held=held(1, granted=7))
    assert job.new() == []
    job.beat(2, "b", 2, held=held(1, granted=8))
    job.beat(2, "b", 3, held=held(1, granted=9))
    assert job.new() == ["2 healed b at step 8"]


def test_who_catches_up_beside_its_steps_has_healed_when_it_joins_at_the_step():
    job = at_work({"a": 7, "b": 3}, catch_up=True)
    job.new()
    job.beat(2, "b", 2, held=held(1, granted=9))
    assert job.new() == []
    for number, name in enumerate("ab", start=1):
        job.handle(asks(10 + number, number, native(name, 10, seen_quorum_id=1, catch_up=True)), 3)
    assert job.new() == ["3 quorum ab quorum 2: 2 participants at step 10", "3 healed b at step 10"]


def test_who_dies_while_it_heals_has_not_healed():
    job = at_work({"a": 7, "b": 3})
    job.new()
    job.lose(2, 1)
    job.handle(opened(3, native("b", 0, "i2")), 2)
    job.handle(asks(3, 3, native("b", 0, "i2")), 2)
    job.handle(asks(4, 1, native("a", 8, seen_quorum_id=1)), 3)
    assert job.new() == [
        "1 lost b its connection was lost",
        "2 joined b",
        "3 quorum ab quorum 2: 2 participants at step 8",
        "3 healing b from step 0 to 8",
    ]


def test_nor_has_one_whose_connection_ended():
    job = at_work({"a": 7, "b": 3})
    job.new()
    job.lose(2, 1)
    job.handle(opened(3, native("b", 3)), 2)
    job.beat(3, "b", 3, held=held(1, granted=8))
    assert job.new() == ["1 lost b its connection was lost", "2 joined b is back"]


def test_stalls_and_their_end():
    job = Job()
    behind = (RankName("b", 0), RankName("b", 1))
    job.history.add_verdict(StallVerdict(Kind.BEHIND, behind, "b/0-1 behind in loader", 61.2), WALL)
    job.history.add_verdict(None, WALL + 5)
    assert job.new() == [
        "0 stall b nothing has moved for 61 s: b/0-1 behind in loader",
        "5 moves  progress resumed",
    ]
