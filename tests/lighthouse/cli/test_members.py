import pytest

from lighthouse.cli.listings import members as command
from lighthouse_protocol.messages.status import MemberState
from tests.lighthouse.statuses import job, many, member, status

FEW = job(
    member("a", MemberState.JOINED, heartbeat_age_s=0.0),
    member("b", MemberState.EXPIRED, heartbeat_age_s=75.0, commit_failures=2, address="[::1]:29512"),
    member("c", MemberState.IDLE, is_participant=False, step=0, address="", start=""),
    member("d", MemberState.DOWN, is_participant=False),
)


def test_a_row_per_replica_group(fake, run):
    fake.answers = [status(FEW)]
    assert run(command).output == (
        "REPLICA  STATE    IN   STEP  RANKS   BEAT  FAILED  ADDRESS      START\n"
        "a        joined   yes     7      8   0.0s       0  host:29512   3f2b8c1e\n"
        "b        expired  yes     7      8  1m15s       2  [::1]:29512  3f2b8c1e\n"
        "c        idle     no      0      8   0.4s       0  -            -\n"
        "d        down     no      7      8   0.4s       0  host:29512   3f2b8c1e\n"
    )


def test_the_job_is_shown_where_there_is_more_than_one(fake, run):
    fake.answers = [status(job(member("a")), job(member("a"), name="other"))]
    assert [line.split()[0] for line in run(command).output.splitlines()] == ["JOB", "default", "other"]


def test_names_are_in_their_natural_order(fake, run):
    fake.answers = [status(job(*(member(f"group_{n}") for n in (1, 10, 2))))]
    assert [line.split()[0] for line in run(command).output.splitlines()[1:]] == ["group_1", "group_2", "group_10"]


def test_says_that_there_are_none(run):
    assert run(command).output == "no members\n"


def test_thousands_are_listed_in_full(fake, run):
    fake.answers = [status(job(*many(5000)))]
    assert len(run(command).output.splitlines()) == 5001


def test_a_pipe_gets_every_character(fake, run):
    name = "n" * 128
    fake.answers = [status(job(member(name)))]
    assert name in run(command).output


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal(fake, run, width):
    fake.answers = [status(job(*many(30), member("long-name-" * 10), name="a-job-with-a-long-name"))]
    lines = run(command, env={"COLUMNS": str(width)}).output.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 32
    assert "STATE" in lines[0]


def test_nothing_from_the_lighthouse_moves_the_cursor(fake, run):
    fake.answers = [status(job(member("a\x1b[2J\nb")))]
    assert "a?[2J?b" in run(command).output
