from lighthouse.cli.listings import ranks as command
from lighthouse_protocol.messages.progress import RankPlace, RankState
from lighthouse_protocol.messages.status import JobStatus
from tests.lighthouse.statuses import job, member, place, status


def stalled(*places: RankPlace, name: str = "default") -> JobStatus:
    verdict = "b/1 behind in validation 3/25, a/0, b/0 waiting in all_reduce"
    return job(member("a"), name=name, ranks=places, stall=verdict, stall_s=63.0)


FEW = stalled(
    place("b", 1, RankState.BEHIND, phase="validation", done=3, total=25, is_inside=False, beat_age_s=75.0),
    place("a", 0),
    place("b", 0, is_inside=False, waits_for="rank 0 validation"),
    place("c", 0, RankState.RUNNING, is_inside=False, progress_age_s=0.2, host="", pid=0),
)


def test_the_verdict_and_a_row_per_rank(fake, run):
    fake.answers = [status(FEW)]
    assert run(command).output == (
        "nothing has moved for 1m03s: b/1 behind in validation 3/25, a/0, b/0 waiting in all_reduce\n"
        "RANK  STATE    STEP  WHERE                        DONE  STILL   BEAT  HOST   PID\n"
        "b/1   behind      7  validation                   3/25  1m03s  1m15s  host  4711\n"
        "a/0   waiting     7  all_reduce                      -  1m03s   0.4s  host  4711\n"
        "b/0   waiting     7  waits for rank 0 validation     -  1m03s   0.4s  host  4711\n"
        "c/0   running     7  -                               -   0.2s   0.4s  -        -\n"
    )
    assert fake.calls[-1]["ranks"] is True


def test_ranks_of_runs_have_a_generation(fake, run):
    trains = place("r", 1, RankState.RUNNING, is_inside=False, generation=100)
    spare = place("r", 2, RankState.SPARE, is_inside=False)
    fake.answers = [status(job(ranks=(trains, spare)))]
    assert run(command).output == (
        "RANK  STATE    GEN  STEP  WHERE  DONE  STILL  BEAT  HOST   PID\n"
        "r/1   running  100     7  -         -  1m03s  0.4s  host  4711\n"
        "r/2   spare      -     7  -         -  1m03s  0.4s  host  4711\n"
    )


def test_of_several_jobs(fake, run):
    fake.answers = [status(FEW, stalled(place("a", 0), name="other"))]
    first, second, titles, *rows = run(command).output.splitlines()
    assert first.startswith("default: nothing has moved")
    assert second.startswith("other: nothing has moved")
    assert titles.startswith("JOB ")
    assert [row.split()[0] for row in rows] == ["default"] * 4 + ["other"]


def test_nobody_has_said_where_it_is(fake, run):
    fake.answers = [status(job(member("a")))]
    assert run(command).output == "no ranks have reported\n"
