import dataclasses
import json

import pytest

from lighthouse.cli import tables
from lighthouse.cli.listings import members, ranks
from lighthouse.cli.status import status as command
from lighthouse_protocol.messages.progress import DataUse
from lighthouse_protocol.messages.run import (
    RunCounters,
    RunStatus,
    RunStopped,
    RunTerms,
    SupervisorHeartbeat,
    SupervisorStatus,
)
from lighthouse_protocol.messages.session import QuorumPhase
from lighthouse_protocol.messages.status import MemberState
from lighthouse_protocol.refusals import UnknownName, Unreachable
from tests.lighthouse.statuses import healing, job, member, run_of, status

TWO_JOBS = status(
    job(member("a"), member("b", MemberState.JOINED, is_participant=False, step=9)),
    job(
        member("c"),
        name="other",
        verdict="waiting_for_stragglers",
        explanation="waiting for d, 52 s more at most; 1 of 2 joined",
        phase="none",
    ),
)


def test_says_of_each_job_whether_it_makes_progress_and_shows_a_row(fake, run):
    fake.answers = [TWO_JOBS]
    assert run(command).output == (
        "default: training: step 7, all train\n"
        "other: waiting for d, 52 s more at most; 1 of 2 joined\n"
        "JOB      VERDICT                 STEP  GROUPS  QUORUM    AGE  PHASE\n"
        "default  formed                     7     1/2      42  3m13s  standing\n"
        "other    waiting_for_stragglers     7     1/1      42  3m13s  none\n"
        "lighthouse 0.1.0 at localhost:29510, up 1h06m\n"
    )


def test_shows_how_far_a_group_has_healed(fake, run):
    fake.answers = [status(job(member("a"), healing("b"), healing("c", source="d", seconds=20.0)))]
    assert run(command).output.splitlines()[:3] == [
        "training: step 7, all train",
        "  c is healing from d: 1.2 of 4.0 GiB, 98 MiB/s, 29 s left",
        "  b is healing from a: 1.2 of 4.0 GiB, 98 MiB/s, 29 s left",
    ]


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (DataUse(6400, 14000), "1,200 of 6,400 samples used in epoch 2, each sample once per epoch"),
        (
            DataUse(100, 40, 3, is_exact=False),
            "40 of 100 samples used in epoch 0, not each sample once per epoch: 3 steps with other batches",
        ),
        (
            DataUse(100, 40, is_exact=False),
            "40 of 100 samples used in epoch 0, not each sample once per epoch: the sampler has changed",
        ),
    ],
)
def test_shows_what_was_used_of_the_data(fake, run, use: DataUse, line: str):
    fake.answers = [status(job(member("a"), data=use))]
    assert f"  data: {line}" in run(command).output.splitlines()


def test_of_many_groups_that_heal_the_longest_heals_are_shown(fake, run):
    fake.answers = [status(job(*(healing(f"g{n}", seconds=n) for n in range(tables.HEALS_SHOWN + 2))))]
    lines = run(command).output.splitlines()[1:6]
    assert [line.split()[0] for line in lines] == ["g5", "g4", "g3", "g2", "2"]
    assert lines[-1] == "  2 more groups healing"


@pytest.mark.parametrize("verb", [command, members, ranks])
def test_json_is_the_status(fake, run, verb):
    fake.answers = [TWO_JOBS]
    shown = json.loads(run(verb, "--format", "json").output)
    assert shown == json.loads(json.dumps(dataclasses.asdict(TWO_JOBS)))
    assert list(shown["jobs"][0]) == [field.name for field in dataclasses.fields(TWO_JOBS.jobs[0])]


RUN = run_of("active", "active", "active", "spare")


def test_runs_stand_below_the_quorums(fake, run):
    fake.answers = [status(job(member("a"), name="other"), runs=(RUN,))]
    assert run(command).output.splitlines()[:-1] == [
        "training: step 7, all train",
        "JOB    VERDICT  STEP  GROUPS  QUORUM    AGE  PHASE",
        "other  formed      7     1/1      42  3m13s  standing",
        "",
        "RUN  GENERATION  ACTIVE  SPARES  RESTARTS  STEP  VERDICT",
        "r             3       3       1         2     7  stands",
    ]


def test_a_job_that_is_only_a_run_shows_no_quorum(fake, run):
    alone = job(quorum_id=0, stall="r/1 behind in step 6, r/0, r/2 in step 7", stall_s=63)
    fake.answers = [status(alone, runs=(RUN,))]
    assert run(command).output.splitlines()[:-1] == [
        "nothing has moved for 1m03s: r/1 behind in step 6, r/0, r/2 in step 7",
        "RUN  GENERATION  ACTIVE  SPARES  RESTARTS  STEP  VERDICT",
        "r             3       3       1         2     7  stalled",
    ]


def test_a_job_without_a_quorum_has_no_id_and_no_age(fake, run):
    fake.answers = [status(job(quorum_id=0, verdict="no_joins", explanation="nobody asks", phase="none"))]
    assert "default  no_joins     0     0/0       -    -  -" in run(command).output


def test_says_that_nobody_has_joined(fake, run):
    assert run(command).output.splitlines()[0] == "no jobs: no replica group or run is connected"


def test_an_unknown_job_is_an_error(fake, run):
    result = run(command, "--job", "typo")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: --job typo: no such job at localhost:29510; `lighthouse status` lists them all\n"


def test_a_refusal_is_one_line_on_stderr(fake, run):
    fake.answers = [Unreachable("localhost:29510 is unreachable:\x1b[2J refused")]
    result = run(command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: localhost:29510 is unreachable:?[2J refused\n"


def test_asks_for_the_job_with_the_timeout(fake, run):
    fake.answers = [TWO_JOBS]
    run(command, "--job", "other", "--timeout", "500ms")
    assert fake.calls[0] == {"address": "localhost:29510", "job": "other", "timeout_s": 0.5}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://coordinator:1234", "coordinator:1234"),
        ("http://coordinator:1234/", "coordinator:1234"),
        ("coordinator", "coordinator:29510"),
        ("[::1]:1234", "[::1]:1234"),
        ("::1", "[::1]:29510"),
    ],
)
def test_reads_addresses(fake, run, given, asked):
    run(command, "--lighthouse", given)
    assert fake.calls[0]["address"] == asked


def test_the_environment_names_the_lighthouse(fake, run):
    run(command, env={"TORCHFT_LIGHTHOUSE": "http://theirs:1"})
    run(command, env={"TORCHFT_LIGHTHOUSE": "http://theirs:1", "LIGHTHOUSE_ADDRESS": "ours:2"})
    run(command, "--lighthouse", "given:3", env={"LIGHTHOUSE_ADDRESS": "ours:2"})
    assert [call["address"] for call in fake.calls if "address" in call] == ["theirs:1", "ours:2", "given:3"]


@pytest.mark.parametrize(
    ("option", "values", "example"),
    [
        (
            "--lighthouse",
            ["https://coordinator:1", "a b:1", "host:port", "host:0", "host:70000", ""],
            "for example coordinator:29510",
        ),
        ("--timeout", ["0", "-1s", "soon", "inf"], "for example 500ms, 5s or 2m"),
    ],
)
def test_a_bad_value_names_the_option_and_shows_an_example(run, option, values, example):
    for given in values:
        result = run(command, option, given)
        assert (result.exit_code, f"'{option}'" in result.stderr, example in result.stderr) == (2, True, True), given


@pytest.mark.parametrize("width", [40, 200])
def test_in_a_stall_the_first_line_says_so_and_nothing_says_the_contrary(fake, run, width):
    verdict = "b/1 behind in validation 3/25, a/0-1, b/0 waiting in all_reduce"
    fake.answers = [status(job(member("a"), stall=verdict, stall_s=63.0))]
    lines = run(command, env={"COLUMNS": str(width)}).output.splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert " ".join(line.strip() for line in lines).startswith(f"nothing has moved for 1m03s: {verdict}")
    assert [word for line in lines for word in line.split() if word in ("formed", "stalled")] == ["stalled"]


def test_a_job_without_a_living_group_does_not_pass_for_one_that_trains(fake, run):
    gone = job(member("a", MemberState.EXPIRED), explanation="no group is alive; 1 took part")
    fake.answers = [status(gone)]
    first, _, row, _ = run(command).output.splitlines()
    assert first == "no group is alive; 1 took part"
    assert row.split()[1:4] == ["all_lost", "7", "0/1"]


def test_a_job_that_has_ended_says_at_which_step(fake, run):
    fake.answers = [status(job(verdict="no_joins", explanation="ended at step 3000", phase="none", ended_step=3000))]
    assert run(command).output.splitlines()[:-1] == ["ended at step 3000"]


def test_fits_80_columns_with_long_names(fake, run):
    groups = (member(f"replica_group_{n}", step=154_100) for n in (1, 10, 2))
    name = "a-job-with-a-long-name-2026"
    waits = job(*groups, name=name, verdict="waiting_for_stragglers", quorum_id=1_795_781_509_013)
    fake.answers = [status(waits)]
    lines = run(command, env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(word in lines[-2] for word in ("waiting_for_stragglers", "154100", "3/3", "1795781509013"))


def test_groups_that_import_torch_are_starting(fake, run):
    def supervisor(name, running):
        return SupervisorStatus(name, "vm", (0, 1), True, SupervisorHeartbeat(0.2, 1, 4, running))

    starting = dataclasses.replace(run_of(), job="j", supervisors=(supervisor("a", 2), supervisor("b", 1)))
    fake.answers = [status(runs=(starting,))]
    assert run(command).output.splitlines()[0] == (
        "j: starting: 2 supervisors, 3 of 4 ranks running, 2 restarts; no rank has joined yet"
    )


@pytest.mark.parametrize(
    ("states", "explanation", "style"),
    [
        ("starting", "starting: g0", "cyan"),
        ("expired starting", "starting: g1", "cyan"),
        ("expired", "waiting for a replica group to join; 0 alive", "red"),
        ("expired", "ended at step 60", ""),
    ],
)
def test_colours_a_job_that_starts_as_one_that_waits_and_not_as_a_failure(states: str, explanation: str, style: str):
    shown_members = (member(f"g{n}", MemberState(state)) for n, state in enumerate(states.split()))
    ended_step = 60 if explanation == "ended at step 60" else None
    shown = tables.progress(job(*shown_members, verdict="no_joins", explanation=explanation, ended_step=ended_step))
    assert (shown.plain, shown.style) == (explanation, style)


@pytest.mark.parametrize(("name", "option"), [("default", ""), ("vision", " --job vision")])
def test_says_which_run_is_stopped_and_by_what(fake, run, name, option):
    fake.answers = [status(job(member("a"), name=name))]
    stop = RunStopped("no\x1b money", "ada", 1)
    stopped = RunStatus(name, "r1", "stopped", RunCounters(), RunTerms(3), (), False, stop, (), (), ())
    fake.runs = [stopped, dataclasses.replace(stopped, run="r2", stop=None)]
    *_, last, _ = run(command, "--job", name).output.splitlines()
    undo = f"`lighthouse resume --run r1{option}`"
    assert last == f"run r1 of job {name} is stopped: no? money (by ada); undo it with {undo}"


@pytest.mark.parametrize("form", ["table", "json"])
def test_says_that_the_run_of_an_unknown_job_is_stopped(fake, run, form):
    """`lighthouse stop` has ended its processes, and then the job had no members any more."""
    fake.answers = [UnknownName("no group has asked for a quorum of 'vision'"), status()]
    stop = RunStopped("no money", "ada", 1)
    fake.runs = [RunStatus("vision", "r1", "stopped", RunCounters(), RunTerms(3), (), False, stop, (), (), ())]
    result = run(command, "--job", "vision", "--format", form)
    assert (result.exit_code, result.stdout) == (1, "")
    undo = "undo it with `lighthouse resume --run r1 --job vision`"
    unknown = "no group has asked for a quorum of 'vision'"
    assert result.stderr == f"Error: {unknown}; run r1 of job vision is stopped: no money (by ada); {undo}\n"


def test_json_asks_for_ranks_and_timeline_too_as_slash_status_has_them(fake, run):
    run(command, "--format", "json")
    assert fake.calls[0]["ranks"] is True


def test_each_phase_of_a_quorum_has_its_colour():
    """The tables name the phases by hand: their import would cost more than all else."""
    assert {*tables._PHASE_STYLES, QuorumPhase.NONE} == set(QuorumPhase)
