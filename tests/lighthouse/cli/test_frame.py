from dataclasses import replace

import pytest

from lighthouse.cli.status import View
from lighthouse_protocol.messages.status import MemberState
from tests.lighthouse.statuses import job, many, member, run_of, status

SMALL = status(job(member("a"), member("b", MemberState.EXPIRED)))


def text(view: View, *, width: int = 80, height: int = 24, now: float = 100.0) -> list[str]:
    return [line.plain for line in view.lines(width, height, now)]


def view(answer=SMALL) -> View:
    return View("host:1", asked_at=99.0, status=answer, answered_at=100.0)


def test_shows_the_quorum_the_reason_and_the_members():
    assert text(view()) == [
        "lighthouse 0.1.0 at host:1, up 1h06m",
        "",
        "default  quorum 42, 3m13s old, standing, step 7",
        "training: step 7, all train",
        "2 members: 1 participant, 1 expired",
        "REPLICA  STATE        IN   STEP  RANKS  BEAT  FAILED  ADDRESS     START",
        "a        participant  yes     7      8  0.4s       0  host:29512  3f2b8c1e",
        "b        expired      yes     7      8  0.4s       0  host:29512  3f2b8c1e",
    ]


def test_a_quorum_that_does_not_stand_has_no_word_for_it():
    assert text(view(status(job(phase="none"))))[2] == "default  quorum 42, 3m13s old, step 0"


def test_says_who_is_behind_before_the_members():
    stalled = job(member("a"), stall="a/1 behind in loader, a/0 waiting in all_reduce", stall_s=63.0)
    lines = text(view(status(stalled)))
    assert lines[3:5] == [
        "nothing has moved for 1m03s: a/1 behind in loader, a/0 waiting in all_reduce",
        "1 member: 1 participant",
    ]
    assert lines[6].startswith("a ")


def test_a_run_has_a_block_of_its_own():
    alone = job(quorum_id=0, stall="r/1 behind in step 6, r/0 in step 7", stall_s=63.0)
    answer = status(alone, runs=(run_of("active", "active", "spare"),))
    assert text(view(answer))[1:] == [
        "",
        "default/r  generation 3, 2 restarts, step 7",
        "stands: 2 active, 1 spare",
        "nothing has moved for 1m03s: r/1 behind in step 6, r/0 in step 7",
        "SLOT  STATE   RANK  GEN  STEP  BEAT  HOST   PID",
        "   0  active     0    3     7  0.4s  host  4711",
        "   1  active     1    3     7  0.4s  host  4712",
        "   2  spare      -    -     0  0.4s  host  4713",
    ]


def test_of_a_large_run_those_that_need_a_look_come_first():
    answer = status(job(quorum_id=0), runs=(run_of(*["active"] * 50, "spare", "lost"),))
    lines = text(view(answer), height=12)
    assert len(lines) == 12
    assert [line.split()[1] for line in lines[5:7]] == ["lost", "active"]
    assert lines[-1] == "and 46 more; `lighthouse ranks` lists them all"


def test_shows_what_fits_and_says_how_many_more():
    crowd = job(*many(5000), member("troubled", MemberState.EXPIRED), member("discards", commit_failures=1))
    lines = text(view(status(crowd)), height=24)
    assert len(lines) == 24
    assert [line.split()[0] for line in lines[6:8]] == ["troubled", "discards"]
    assert lines[-1] == "and 4985 more; `lighthouse members` lists them all"


@pytest.mark.parametrize("jobs", [0, 1, 2, 7, 50])
@pytest.mark.parametrize("members", [0, 1, 2, 9, 200])
@pytest.mark.parametrize(("width", "height"), [(20, 6), (80, 24), (200, 60)])
@pytest.mark.parametrize("stall", ["", "behind " * 30])
def test_never_more_than_the_terminal_holds(jobs, members, width, height, stall):
    names = [f"job{number}" for number in range(jobs)]
    busy = status(*(job(*many(members), name=name, explanation="why " * 30, stall=stall) for name in names))
    for shown in (view(busy), replace(view(busy), failing_since=99.0, error="refused " * 40)):
        lines = text(shown, width=width, height=height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width


def test_an_unreachable_lighthouse_leaves_its_last_table_dimmed():
    lost = replace(view(), failing_since=90.0, error="connection refused")
    lines = lost.lines(80, 24, 102.5)
    assert lines[0].plain.startswith("lighthouse unreachable since ")
    assert "(12s)" in lines[0].plain
    assert lines[1].plain == "  connection refused"
    assert all(any("dim" in str(span.style) for span in line.spans) for line in lines[3:])


def test_a_lighthouse_that_refuses_is_not_called_unreachable():
    refused = replace(view(None), failing_since=90.0, error="no such job", is_unreachable=False)
    assert text(refused)[0].startswith("lighthouse refuses since ")


def test_a_slow_answer_is_seen():
    assert text(View("host:1", asked_at=100.0), now=101.0) == ["asking host:1"]
    assert text(View("host:1", asked_at=100.0), now=103.5) == ["waiting for host:1 to answer, 3.5s"]
    assert text(view(), now=200.0)[0] == "lighthouse 0.1.0 at host:1, up 1h06m"
