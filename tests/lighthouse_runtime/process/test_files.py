"""Folders of secrets."""

import os
import stat
from pathlib import Path

from lighthouse_runtime.process.files import make_private


def test_no_umask_opens_a_folder_or_its_parents(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    made = (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c")
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700] * 3
