import json

import pytest

from lighthouse.cli.drain import drain as command
from lighthouse_protocol.refusals import UnknownName, WrongState


def test_asks_and_says_so(fake, run):
    result = run(command, "a", "--reason", "maintenance", "--job", "other")
    assert result.output == "replica group a of job other drains\n"
    assert fake.calls == [
        {
            "address": "localhost:29510",
            "job": "other",
            "token": None,
            "verb": "drain",
            "replica_id": "a",
            "msg": "maintenance",
            "timeout_s": 10.0,
        }
    ]


def test_json(run):
    shown = json.loads(run(command, "a", "--format", "json").output)
    assert shown == {"job": "default", "replica_id": "a", "reason": "", "draining": True}


@pytest.mark.parametrize(
    "error",
    [
        UnknownName("replica_id: no live replica group 'a'; alive: b"),
        WrongState("replica_id: a holds no session, so it cannot be asked; kill it instead"),
    ],
)
def test_a_refusal_is_one_line_on_stderr(fake, run, error):
    fake.answers = [error]
    result = run(command, "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {error}\n"


def test_sends_the_token_of_the_file(fake, run, tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    run(command, "a", "--control-token-file", str(file))
    assert fake.calls[0]["token"] == "secret"


def test_a_bad_token_file_names_the_option(fake, run, tmp_path):
    result = run(command, "a", "--control-token-file", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert "--control-token-file" in result.stderr
    assert fake.calls == []


def test_says_who_is_to_drain(run):
    result = run(command)
    assert result.exit_code == 2
    assert "REPLICA_ID" in result.stderr
