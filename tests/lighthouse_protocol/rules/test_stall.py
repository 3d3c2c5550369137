"""The verdict, rule by rule, and its promises for drawn ranks.

A line of stall.txt has ranks, and behind the arrow the verdict on them. `in` and `left` are the collective that a rank
is in, or was in last: its number, in quorum 1 where no other stands before a dot. `calls`: how many it has entered in
process groups of its script, with an exclamation mark where it is in one; `before`: what it has entered before that and
is in, too; `at`: its line. `incomplete`: other groups are there. `floor`: in seconds, if it is not 60.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse_protocol.messages.progress import Collective, GroupCalls, OpenPhase, RankName, RankView
from lighthouse_protocol.rules.stall import FLOOR_S, MAX_TIMES, Kind, Limits, PauseLog, find_stall, span, time_left_s
from tests.lighthouse_protocol.views import after, all_reduce, rank
from tests.scenarios.paragraphs import scenarios_of

FILE = Path(__file__).with_name("stall.txt")


def ranks_of(text: str) -> Iterator[RankView]:
    for name, *words in map(shlex.split, text.split("; ")):
        group, _, numbers = name.rpartition("/")
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield rank_of(group, number, **dict(word.split("=", 1) for word in words))


def rank_of(group: str, number: int, *, phase: str = "", entered: str = "", waits: str = "", **told: str) -> RankView:
    name, _, ticks = phase.partition(":")
    counts = {entry.partition(":")[0]: int(entry.partition(":")[2]) for entry in entered.split(",") if entry}
    where: dict[str, Collective] = {}
    for key in told.keys() & {"in", "left"}:
        quorum_id, _, number_there = told[key].rpartition(".")
        there = all_reduce(
            int(number_there), int(quorum_id or 1), told.get("operation", "all_reduce"), told.get("shape", "")
        )
        where = {"inside": there} if key == "in" else {"left": after(there)}
    view = rank(
        number,
        *([OpenPhase(name, *map(int, ticks.split("/") if ticks else ()))] if phase else []),
        step=int(told.get("step", 1)),
        still_s=float(told.get("still", 100)),
        limit_s=float(told.get("limit", 60)),
        beat_age_s=float(told.get("beat", 0)),
        waits_for=waits,
        entered=counts,
        group=group,
        **where,
    )
    calls = [entry.partition(":")[::2] for entry in told.get("calls", "").split(",") if entry]
    made = [
        GroupCalls(
            name,
            int(count.strip("!")),
            "!" in count,
            told.get("operation", "all_reduce"),
            before=tuple(told.get("before", "").split(",")) if "before" in told else (),
        )
        for name, count in calls
    ]
    return replace(view, sample=replace(view.sample, calls=tuple(made), at=told.get("at", "")))


def play(paragraph: str) -> str:
    """The same paragraph, with the verdicts behind the arrows."""
    lines: list[str] = []
    for line in paragraph.splitlines():
        told = line.partition(" -> ")[0]
        if not line.startswith("#"):
            floor, ranks = re.fullmatch(r"(?:floor=(\d+) )?(?:incomplete: )?(.*)", told).groups()
            verdict = find_stall(
                list(ranks_of(ranks)), floor_s=float(floor or FLOOR_S), is_complete="incomplete" not in told
            )
            line = f"{told} -> {'none' if verdict is None else verdict.text}"
        lines.append(line)
    return "\n".join(lines)


@scenarios_of(FILE, play)
def test_the_verdict(paragraph: str):
    assert play(paragraph).splitlines() == paragraph.splitlines()


def test_of_nobody_there_is_none():
    assert find_stall([]) is None


@pytest.mark.parametrize(
    ("ranks", "kind", "behind", "still_s"),
    [
        ("a/0 in=3; a/1 left=2 still=80; b/0 in=3", Kind.BEHIND, (RankName("a", 1),), 80),
        ("0 in=3; 1 in=3 beat=11", Kind.BEHIND, (RankName("", 1),), 100),
        ("0 in=3 still=70; 1-3 in=3 still=71", Kind.NETWORK, (), 70),
        ("0 in=3; 1-7 in=3 operation=broadcast", Kind.DIVERGENCE, (), 100),
    ],
)
def test_its_kind_and_its_suspects(ranks: str, kind: Kind, behind: tuple[RankName, ...], still_s: float):
    verdict = find_stall(list(ranks_of(ranks)))
    assert verdict is not None
    assert (verdict.kind, verdict.behind, verdict.still_s) == (kind, behind, still_s)


class TestLimits:
    limits = Limits(floor_s=60, factor=5, first_s=600)

    @pytest.mark.parametrize(("longest_s", "limit_s"), [(1, 60), (12, 60), (12.5, 62.5), (100, 500)])
    def test_a_multiple_of_the_longest_and_a_floor(self, longest_s: float, limit_s: float):
        assert self.limits.limit_s(longest_s, is_first=False) == limit_s

    def test_what_was_never_seen_and_a_first_step_have_an_allowance(self):
        assert self.limits.limit_s(0, is_first=False) == 600
        assert self.limits.limit_s(1, is_first=True) == 600
        assert self.limits.limit_s(200, is_first=True) == 1000


# -- drawn

collectives = st.builds(
    lambda quorum_id, number, is_inside: replace(all_reduce(number, quorum_id), is_inside=is_inside),
    st.integers(1, 2), st.integers(1, 3), st.booleans(),
)  # fmt: skip


@st.composite
def groups(draw: st.DrawFn) -> list[RankView]:
    def one(number: int) -> RankView:
        phases = draw(
            st.lists(st.builds(OpenPhase, st.sampled_from("xy"), st.integers(0, 2)), max_size=2, unique_by=str)
        )
        counts = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 2), max_size=3))
        view = rank(
            number,
            *phases,
            step=draw(st.integers(0, 2)),
            still_s=draw(st.floats(0, 200)),
            limit_s=draw(st.sampled_from([60.0, 120.0])),
            waits_for=draw(st.sampled_from(["", "", "rank 0"])),
            entered=counts,
        )
        return replace(view, sample=replace(view.sample, collective=draw(st.none() | collectives)))

    return [one(number) for number in range(draw(st.integers(1, 6)))]


def order(view: RankView) -> tuple[int, int]:
    return view.sample.collective.order if view.sample.collective else (0, 0)


@settings(max_examples=40)
@given(groups(), st.booleans())
def test_promises(ranks: list[RankView], is_complete: bool):
    verdict = find_stall(ranks, is_complete=is_complete)
    if any(r.is_running and r.progress_age_s <= r.limit_s for r in ranks) or all(r.progress_age_s <= 60 for r in ranks):
        assert verdict is None  # something may move
    if verdict is None:
        return
    assert time_left_s(ranks) < 0
    assert bool(verdict.behind) == (verdict.kind is Kind.BEHIND)
    for suspect in (r for r in ranks if r.name in verdict.behind):
        assert suspect.is_running or suspect.sample.is_inside  # who has declared to wait is none
        if suspect.sample.is_inside:  # nor who is in a collective that others have not entered
            assert is_complete
            assert all(order(other) >= order(suspect) for other in ranks)
    assert len(verdict.behind) < len(ranks)  # behind whom?
    judged = find_stall(ranks[::-1], is_complete=is_complete)
    assert judged is not None
    assert (judged.kind, judged.behind) == (verdict.kind, verdict.behind)


@settings(max_examples=40)
@given(groups())
def test_waiting_longer_brings_a_verdict_and_never_takes_it_away(ranks: list[RankView]):
    later = [r.aged(1000) for r in ranks]
    verdict = find_stall(later)
    assert verdict is not None
    before = find_stall(ranks)
    assert before is None or (before.kind, before.behind) == (verdict.kind, verdict.behind)


def held_up(*times: tuple[float, float]) -> PauseLog:
    """Each: from when until when."""
    found = PauseLog()
    for began_at, ended_at in times:
        found.add_pause(ended_at - began_at, ended_at)
    return found


@pytest.mark.parametrize(
    ("age_s", "within_s"),
    [(0, 0), (5, 0), (10, 0), (15, 5), (30, 20), (35, 20), (40, 20), (45, 25), (1000, 30)],
)
def test_what_of_an_age_it_was(age_s: float, within_s: float):
    """From 50 to 60 and from 70 to 90; it is 100."""
    assert held_up((50, 60), (70, 90)).paused_s(age_s, 100) == within_s


def test_a_rank_has_moved_as_long_ago_as_somebody_was_there_to_see():
    """A beat from before the pause, and a sample that was taken in it."""
    told_before = rank(0, still_s=1.0).aged(26.0)
    told_after = rank(1, still_s=15.0).aged(5.0)
    found = [held_up((75, 95)).without_pauses(each, 100) for each in (told_before, told_after)]
    assert [(each.beat_age_s, each.sample.still_s) for each in found] == [(6.0, 1.0), (5.0, 0.0)]
    assert held_up((10, 20)).without_pauses(told_after, 100) is told_after


def test_nobody_stalls_by_a_pause_and_who_stalled_before_still_does():
    """It is 200, and from 100 to 190 nobody looked."""
    paused = held_up((100, 190))
    moves = [rank(n, still_s=1.0).aged(100.0) for n in range(2)]
    stalls = [rank(n, still_s=170.0) for n in range(2)]
    assert [find_stall([paused.without_pauses(each, 200) for each in ranks]) is None for ranks in (moves, stalls)] == [
        True,
        False,
    ]


TIMES = st.lists(st.tuples(st.floats(0.01, 50), st.floats(0.75, 100)), min_size=1, max_size=3 * MAX_TIMES)
"""How long it ran, and was held up then."""


@given(TIMES, st.floats(0, 1e4))
def test_of_many_times_the_newest_are_known_exactly_and_of_all_no_more_than_they_were(
    times: list[tuple[float, float]], age_s: float
):
    found, now, spans = PauseLog(), 0.0, list[tuple[float, float]]()
    for ran_s, length_s in times:
        spans.append((now + ran_s, now + ran_s + length_s))
        now += ran_s + length_s
        found.add_pause(length_s, now)
    exact = sum(max(0.0, ended_at - max(began_at, now - age_s)) for began_at, ended_at in spans)
    within = found.paused_s(age_s, now)
    assert 0 <= within <= min(age_s, sum(length_s for _, length_s in times)) + 1e-6
    if len(times) <= MAX_TIMES or now - age_s >= spans[-MAX_TIMES + 1][0]:
        assert within == pytest.approx(exact, abs=1e-6)
    assert within >= exact - 1e-6, "nobody looks older than they are"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 ms"),
        (0.0004, "0 ms"),
        (0.0394, "39 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2.0 h"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text
