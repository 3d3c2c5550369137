import json
from dataclasses import replace

import pytest

from lighthouse.cli.control import resume, stop
from lighthouse.cli.listings import keys, runs
from lighthouse_protocol.messages.run import (
    KeyKind,
    RunCounters,
    RunStatus,
    RunStopped,
    RunTerms,
    SupervisorHeartbeat,
    SupervisorStatus,
)

RUN = RunStatus("default", "r1", "stands", RunCounters(1, 0, 1, 1), RunTerms(3), (0, 2), False, None, (), (), ())


def test_a_line_for_each_run(fake, run):
    stopped = replace(
        RUN, run="r2", verdict="stopped", stop=RunStopped("exit code 130", "g0", 1), counters=RunCounters()
    )
    fake.runs = [RUN, stopped]
    assert run(runs).output == (
        "default/r1  generation 1, 2 ranks, 1 restart, stands\n"
        "default/r2  no generation yet, 0 restarts, stopped: exit code 130 (by g0)\n"
    )
    assert run(runs, "--run", "r1").output == "default/r1  generation 1, 2 ranks, 1 restart, stands\n"
    assert fake.calls == [{"verb": "runs", "run": ""}, {"verb": "runs", "run": "r1"}]
    fake.runs = []
    assert run(runs).output == "no runs\n"


def test_a_run_of_supervised_groups_shows_each_with_its_restarts(fake, run):
    a = SupervisorStatus("a", "n0", (0, 1), True, SupervisorHeartbeat(0.25, 1, 3, 2))
    b = SupervisorStatus("b", "n1", (0, 1), False, SupervisorHeartbeat(1.0, 4, 0, 0))
    fake.runs = [replace(RUN, counters=RunCounters(), verdict="nobody_ready", supervisors=(a, b))]
    assert run(runs).output.splitlines() == [
        "default/r1  2 supervisors, 2 of 4 ranks running, 5 restarts",
        "  GROUP  STATE    RANKS  RESTARTS  LEFT  HOST",
        "  a      running    2/2         1     3  n0",
        "  b      gone         -         4     0  n1",
    ]


def test_json(fake, run):
    fake.runs = [RUN]
    (shown,) = json.loads(run(runs, "--format", "json").output)
    assert (shown["run"], shown["counters"]["number"]) == ("r1", 1)


@pytest.mark.parametrize(("command", "done"), [(stop, "stopped"), (resume, "resumed")])
def test_what_is_asked_and_said(fake, run, command, done):
    fake.runs = [
        replace(RUN, stop=RunStopped("maintenance", "ada", 1)),
        replace(RUN, run="default", stop=RunStopped("x", "y", 1)),
    ]
    result = run(command, "--run", "r1", "--job", "j")
    assert result.output == f"run r1 of job j is {done}\n"
    call = fake.calls[-1]
    assert (call["verb"], call["job"], call["run"]) == (command.name, "j", "r1")
    assert json.loads(run(command, "--format", "json").output)[done] is True


@pytest.mark.parametrize("runs", [[], [RUN]])
def test_what_was_not_stopped_is_not_said_to_be_resumed(fake, run, runs):
    fake.runs = runs
    assert run(resume, "--run", "r1").output == (
        "run r1 of job default was not stopped and excludes no host; nothing to resume\n"
    )
    assert json.loads(run(resume, "--run", "r1", "--format", "json").output)["resumed"] is False


def test_the_reason_goes_to_all(fake, run):
    run(stop, "--reason", "maintenance")
    assert (fake.calls[0]["reason"], fake.calls[0]["run"]) == ("maintenance", "default")


def test_keys_are_named_as_in_the_documents(fake, run):
    fake.keys = {(KeyKind.JOB_RESTART, "count"): b"1", (KeyKind.ITERATION, "rank_0"): b"5"}
    assert run(keys).output == "iteration_7_rank_0 = 5\njob_restart_7_count = 1\n"
    shown = json.loads(run(keys, "--format", "json").output)
    assert (shown["generation"], shown["keys"]["iteration_7_rank_0"]) == (7, "5")
    assert "iteration_5_rank_0 = 5" in run(keys, "--generation", "5").output


def test_no_keys(run):
    assert run(keys).output == "no keys\n"
