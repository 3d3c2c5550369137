import json

import pytest

from lighthouse.cli.kill import kill as command
from protos.refusals import UnknownName


def test_kills_and_says_so(fake, run):
    result = run(command, "a", "--message", "maintenance", "--job", "other")
    assert result.output == "killed replica group a of job other\n"
    assert fake.calls == [
        {
            "address": "localhost:29510",
            "job": "other",
            "token": None,
            "replica_id": "a",
            "msg": "maintenance",
            "timeout_s": 10.0,
        }
    ]


def test_json(run):
    shown = json.loads(run(command, "a", "--format", "json").output)
    assert shown == {"job": "default", "replica_id": "a", "message": "", "killed": True}


def test_a_refusal_is_one_line_on_stderr(fake, run):
    fake.answers = [UnknownName("replica_id: no live replica group 'x'; alive: a, b")]
    result = run(command, "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: replica_id: no live replica group 'x'; alive: a, b\n"


def test_sends_the_token_of_the_file(fake, run, tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    run(command, "a", "--control-token-file", str(file))
    assert fake.calls[0]["token"] == "secret"


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe"])
def test_a_bad_token_file_names_the_option(fake, run, tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    result = run(command, "a", "--control-token-file", str(file))
    assert result.exit_code == 2
    assert "--control-token-file" in result.stderr
    assert fake.calls == []
