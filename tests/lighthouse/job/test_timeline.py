"""What happened to a job: what is one entry, what is kept."""

from lighthouse.job.status import NAMES, Timeline
from lighthouse_protocol.messages.status import TimelineEntry, TimelineKind

JOINED, LOST = TimelineKind.JOINED, TimelineKind.LOST


def test_what_happens_alike_in_one_moment_is_one_entry():
    timeline = Timeline()
    timeline.note(10.0, JOINED, ("a",))
    timeline.note(10.5, JOINED, ("b",))
    timeline.note(10.6, LOST, ("a",), "it fell silent")
    timeline.note(10.7, LOST, ("b",), "has restarted")
    timeline.note(12.0, LOST, ("c",), "has restarted")
    assert timeline.entries == (
        TimelineEntry(10.0, JOINED, ("a", "b"), 0, ""),
        TimelineEntry(10.6, LOST, ("a",), 0, "it fell silent"),
        TimelineEntry(10.7, LOST, ("b",), 0, "has restarted"),
        TimelineEntry(12.0, LOST, ("c",), 0, "has restarted"),
    )


def test_a_thousand_that_come_are_one_entry_with_the_first_names():
    timeline = Timeline()
    for number in range(1000):
        timeline.note(0.0005 * number, JOINED, (f"g{number}",))
    [entry] = timeline.entries
    assert entry.replica_ids == tuple(f"g{number}" for number in range(NAMES))
    assert entry.more == 1000 - NAMES


def test_entries_about_nobody_stay_apart():
    timeline = Timeline()
    timeline.note(0.0, TimelineKind.MOVES, (), "progress resumed")
    timeline.note(0.0, TimelineKind.MOVES, (), "progress resumed")
    assert len(timeline.entries) == 2


def test_the_newest_are_kept():
    timeline = Timeline(limit=3)
    for moment in range(0, 10, 2):
        timeline.note(moment, JOINED, (f"g{moment}",))
    assert [entry.replica_ids for entry in timeline.entries] == [("g4",), ("g6",), ("g8",)]
