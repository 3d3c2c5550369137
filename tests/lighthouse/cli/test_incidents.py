import json
import re

import pytest

from lighthouse.cli.incidents import clock
from lighthouse.cli.incidents import incident as incident_command
from lighthouse.cli.incidents import incidents as incidents_command
from lighthouse.cli.listings import stacks as stacks_command
from lighthouse.job.incidents import incident_of
from lighthouse.job.records import RestartRecord
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentKind, from_document
from lighthouse_protocol.messages.run import ProcessLost, RankId
from lighthouse_protocol.refusals import UnknownName
from tests.lighthouse.evidence import STACKS, incident, member, summary

RECORDED = [
    {"group": "17", "seq": 23, "operation": "gloo:broadcast", "input_sizes": [[]], "retired": True, "age_s": 70},
    {"group": "17", "seq": 24, "operation": "gloo:all_reduce", "input_sizes": [[4096, 1024]], "age_s": 63.14},
]
STALL = Incident(
    summary(
        evidence_s=63.9,
        acted_s=63.9,
        action="killed b, whose ranks are behind",
        quorum_s=66.0,
        quorum_id=18,
        step_s=67.5,
        over_s=64.5,
    ),
    (
        member("b/1", stacks=STACKS, flight_recorder=json.dumps(RECORDED), output=("step 812", "a\x1b[2Jtab\tend")),
        member("a/0", stacks="", flight_recorder="", process="", output=(), missing=("stacks: it has ended",)),
    ),
    ("c: no full answer within 10 s",),
)
SLOW = incident("20251122-121501", kind=IncidentKind.SLOW, text="b/1 is slow", noticed_s=60.0, over_s=200.0)
LOSS = incident("20251122-111501", kind=IncidentKind.LOSS, text="b: it fell silent", suspects=("b",), noticed_s=5.0)


def test_a_row_per_incident(fake, run):
    fake.incidents = [STALL, LOSS]
    at = clock(STALL.summary.opened_unix_s)
    assert run(incidents_command).output == (
        "ID               NOTICED AT           KIND   NOTICED  RECOVERED  BACK  WHAT\n"
        f"20251122-101501  {at}  stall    1m03s      1m08s     -"
        "  b/1 behind in validation 3/25, a/0, b/0 waiting in all_reduce\n"
        f"20251122-111501  {at}  loss      5.0s          -     -  b: it fell silent\n"
    )


def test_of_several_jobs_and_of_none(fake, run):
    fake.incidents = [STALL, incident("i2", job="other")]
    assert [line.split()[1] for line in run(incidents_command).output.splitlines()] == ["JOB", "default", "other"]
    fake.incidents = []
    assert run(incidents_command, "--job", "x").output == "no incidents\n"
    assert fake.calls[-1] == {"verb": "incidents", "job": "x"}


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_small_terminal(fake, run, width):
    fake.incidents = [STALL, LOSS]
    lines = run(incidents_command, env={"COLUMNS": str(width)}).output.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("20251122-1") for line in lines[1:]), "an id can be typed as it is shown"
    told = run(incident_command, STALL.id, env={"COLUMNS": str(width)}).output
    assert max(map(len, told[: told.index("b/1  behind")].splitlines())) <= width


def test_all_of_one_incident(fake, run):
    fake.incidents = [STALL]
    told = run(incident_command, STALL.id).output
    assert told == (
        "20251122-101501  stall  job default\n"
        "b/1 behind in validation 3/25, a/0, b/0 waiting in all_reduce\n"
        "\n"
        "     +0.00s the fault: the last progress\n"
        f"    +63.20s noticed, at {clock(STALL.summary.opened_unix_s)}\n"
        "    +63.90s evidence collected\n"
        "    +63.90s killed b, whose ranks are behind\n"
        "    +64.50s progress resumed\n"
        "    +66.00s quorum 18 formed\n"
        "    +67.50s first step committed\n"
        "\n"
        "b/1  behind, pid 4711 on node-4, after 0.3 s\n"
        "  stacks, the main thread first\n"
        "    Thread 0x00007f1c2d7fe700 (most recent call first):\n"
        '      File "/job/train.py", line 41 in validate\n'
        '      File "/job/train.py", line 88 in main\n'
        "    \n"
        "    Thread 0x00007f1c2dffe700 (most recent call first):\n"
        '      File "/lib/selectors.py", line 415 in select\n'
        "  Flight Recorder, the newest last\n"
        "    23 gloo:broadcast, 70.0 s ago: over (group 17)\n"
        "    24 gloo:all_reduce 4096x1024, 63.1 s ago: no state (group 17)\n"
        "  process\n"
        "    state: S (sleeping)\n"
        "    wchan: futex_wait_queue\n"
        "  last output\n"
        "    step 812\n"
        "    a?[2Jtab        end\n"
        "\n"
        "a/0  pid 4711 on node-4, after 0.3 s\n"
        "  missing\n"
        "    stacks: it has ended\n"
        "\n"
        "missing  c: no full answer within 10 s\n"
    )


def test_a_loss_as_it_goes_on(fake, run):
    fake.incidents = [LOSS]
    assert "+0.00s the fault: the last heartbeat\n" in run(incident_command, LOSS.id).output


def test_a_slow_rank_recovers_when_it_is_no_longer_slow(fake, run):
    fake.incidents = [SLOW]
    told = run(incident_command, SLOW.id).output
    assert "+0.00s the fault: the first slow comparison\n" in told
    assert "+200.00s no longer slow\n" in told
    [row] = run(incidents_command).output.splitlines()[1:]
    assert row.split()[3:7] == ["slow", "1m00s", "3m20s", "-"]


def test_only_those_of_one_kind(fake, run):
    fake.incidents = [STALL, LOSS]
    assert [line.split()[3] for line in run(incidents_command, "--kind", "loss").output.splitlines()[1:]] == ["loss"]


def test_a_restart_of_a_run(fake, run):
    lost = ProcessLost(RankId(1, "a1"), "SIGSEGV", ("last words",))
    restart = RestartRecord(0, "slot 1 (a1): SIGSEGV", 1e9, "i1", (lost.rank,), 1, 1e9 + 0.25, 1e9 + 1.5, (lost,))
    fake.incidents = [incident_of(("default", "r1"), restart)]
    told = run(incident_command, "i1").output
    assert told == (
        "i1  restart  job default\n"
        "run r1, generation 0: slot 1 (a1): SIGSEGV\n"
        "\n"
        "     +0.00s the fault\n"
        f"     +0.00s noticed, at {clock(1e9)}\n"
        "     +0.25s generation 1 formed\n"
        "     +0.25s progress resumed\n"
        "     +1.50s first step committed\n"
        "\n"
        "r1/1  no pid, after 0.0 s\n"
        "  process\n"
        "    ended: SIGSEGV\n"
        "  last output\n"
        "    last words\n"
        "\n"
    )


def test_json(fake, run):
    fake.incidents = [STALL, LOSS]
    assert from_document(json.loads(run(incident_command, STALL.id, "--format", "json").output)) == STALL
    [stall, loss] = json.loads(run(incidents_command, "--format", "json").output)
    assert (stall["id"], stall["kind"], stall["step_s"]) == (STALL.id, "stall", 67.5)
    assert (loss["suspects"], loss["step_s"]) == (["b"], None)
    fake.gathered = Gathered(STALL.evidence, STALL.missing)
    read = json.loads(run(stacks_command, "--format", "json").output)
    assert (read["evidence"][0]["replica_id"], read["evidence"][0]["group_rank"]) == ("b", 1)
    assert read["missing"] == ["c: no full answer within 10 s"]


def test_an_unknown_id(fake, run):
    fake.answers = [UnknownName("no incident 'x'; the newest: none")]
    result = run(incident_command, "x")
    assert (result.exit_code, result.output) == (1, "Error: no incident 'x'; the newest: none\n")


def test_stacks_of_some_ranks(fake, run):
    fake.gathered = Gathered(STALL.evidence[:1])
    options = ("--rank", "b/1", "--rank", "c", "--job", "j")
    told = run(stacks_command, *options).output
    assert told.startswith("b/1  pid 4711 on node-4, after 0.3 s\n  stacks, the main thread first\n    Thread ")
    asked = fake.calls[-1]
    assert (asked["ranks"], asked["job"], asked["timeout_s"]) == (("b/1", "c"), "j", 15.0)


def test_stacks_without_a_rank_say_so(fake, run):
    fake.gathered = Gathered(())
    assert run(stacks_command).output.startswith("no rank is in a quorum; ")


def test_a_recorder_that_is_no_list_is_shown_as_it_is(fake, run):
    fake.gathered = Gathered((member("b/1", flight_recorder="not JSON"), member("b/2", flight_recorder='{"a": 1}')))
    told = run(stacks_command).output
    assert re.search(r"newest last\n    not JSON\n", told)
    assert '    {"a": 1}\n' in told


@pytest.mark.parametrize("recorded", ['[{"input_sizes": 5}]', '[{"input_sizes": [5]}]', "[" * 12_000])
def test_a_recorder_of_another_form_is_shown_as_it_is(fake, run, recorded):
    """It is the text of a rank, which may lie, or use a newer PyTorch; the other ranks are shown nevertheless."""
    fake.gathered = Gathered((member("b/1", flight_recorder=recorded), member("b/2", flight_recorder="[1]")))
    result = run(stacks_command)
    assert result.exit_code == 0
    assert f"    {recorded}\n" in result.output
    assert "b/2" in result.output
