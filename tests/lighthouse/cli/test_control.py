import json
import sys

import pytest

from lighthouse.cli.control import drain, kill
from lighthouse_protocol.messages.status import MemberState
from tests.lighthouse.statuses import job, member, status


@pytest.mark.parametrize(
    ("command", "asked", "said"),
    [
        (kill, {}, "killed replica group a of job other\n"),
        (drain, {"verb": "drain"}, "replica group a of job other is draining\n"),
    ],
)
def test_asks_and_says_so(fake, run, command, asked, said):
    assert run(command, "a", "--reason", "maintenance", "--job", "other").output == said
    what = {"job": "other", "replica_id": "a", "msg": "maintenance", "timeout_s": 10.0}
    assert fake.calls[-1] == {"address": "localhost:29510"} | what | asked


@pytest.mark.parametrize(("command", "done"), [(kill, "killed"), (drain, "draining")])
def test_json(run, command, done):
    shown = json.loads(run(command, "a", "--format", "json").output)
    assert shown == {"job": "default", "replica_id": "a", "reason": "", done: True}


@pytest.mark.parametrize("others", [(), (member("b", MemberState.EXPIRED),)])
def test_the_last_live_group_is_not_killed_without_a_word(fake, run, others):
    fake.answers = [status(job(member("a"), *others))]
    result = run(kill, "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: a is the last live replica group of job default, and training stops with")
    assert "--force" in result.stderr
    assert [call for call in fake.calls if "replica_id" in call] == []
    assert run(kill, "a", "--force").exit_code == 0


def test_the_last_one_is_known_by_torchfts_name_of_it_too(fake, run):
    fake.answers = [status(job(member("a")))]
    result = run(kill, "a:5f0c1d1e-8a9b-4c3d-9e2f-001122334455")
    assert (result.exit_code, "is the last live replica group" in result.stderr) == (1, True)
    assert [call for call in fake.calls if "replica_id" in call] == []


@pytest.mark.parametrize(("typed", "is_killed"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_person_is_asked(fake, run, monkeypatch, typed, is_killed):
    fake.answers = [status(job(member("a")))]
    monkeypatch.setattr(sys.modules["lighthouse.cli.control"], "is_terminal", lambda: True)
    result = run(kill, "a", typed=typed)
    assert "Kill it? [y/N]" in result.stderr
    assert any("replica_id" in call for call in fake.calls) is is_killed


def test_one_of_several_is_killed_at_once(fake, run):
    fake.answers = [status(job(member("a"), member("b", MemberState.DOWN)))]
    assert run(kill, "a").output == "killed replica group a of job default\n"
