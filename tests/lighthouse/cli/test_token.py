"""`lighthouse token`, where the credentials cannot be used."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from lighthouse.cli import main
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security.credentials import FILE, Tokens, load_or_make
from tests.lighthouse.cli.conftest import unreadable


def test_a_token_that_cannot_be_written_is_not_rotated(tmp_path: Path) -> None:
    folder = load_or_make(tmp_path / "made", ()).folder
    before = Tokens.read(folder).newest(Role.JOIN)
    (folder / f".{FILE}.{os.getpid()}").mkdir()  # where the new file is written first
    result = CliRunner().invoke(main, ["token", "rotate", "join", "--credentials", str(folder)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: --credentials: cannot write to {folder}: Is a directory; no token has changed\n"
    assert Tokens.read(folder).newest(Role.JOIN) == before


@pytest.mark.parametrize("arguments", [["join"], ["rotate", "view"]])
def test_the_credentials_of_another_user(tmp_path: Path, arguments: list[str]) -> None:
    folder = load_or_make(tmp_path / "made", ()).folder
    with unreadable(folder):
        result = CliRunner().invoke(main, ["token", *arguments, "--credentials", str(folder)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: --credentials: cannot read {folder}: Permission denied; run this as the user of the lighthouse\n"
    )
