"""Folders of secrets, and files that are read again when they change."""

import os
import stat
from pathlib import Path

from lighthouse_runtime.process.files import WatchedFile, file_stamp, make_private
from tests.processes import eventually


def test_no_umask_opens_a_folder_or_its_parents(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    made = (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c")
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700] * 3


def test_what_could_not_be_read_is_read_again_though_the_file_has_not_changed_since(tmp_path: Path) -> None:
    """As when the process has no descriptor left, or may not read the file until its owner is set right."""
    path, errors = tmp_path / "tokens", list[OSError]()

    def read() -> str:
        if errors:
            raise errors.pop()
        return path.read_text()

    path.write_text("old")
    watched = WatchedFile(read, path)
    path.write_text("new, and longer")
    errors.append(PermissionError("not yet"))
    watched.reload_if_changed()
    assert (watched.current, watched.error) == ("old", "not yet")
    watched.reload_if_changed()
    assert (watched.current, watched.error) == ("new, and longer", "")


def test_a_file_that_is_back_as_it_was_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old")
    watched = WatchedFile(path.read_text, path)
    before = file_stamp(path)
    path.rename(tmp_path / "away")
    watched.reload_if_changed()
    assert (watched.current, "No such file" in watched.error) == ("old", True)
    (tmp_path / "away").rename(path)
    watched.reload_if_changed()
    assert (watched.current, watched.error, file_stamp(path)[0][1]) == ("old", "", before[0][1])


def test_other_permissions_are_a_change(tmp_path: Path) -> None:
    """A client reads its files again only after a change, and only once."""
    path = tmp_path / "client.key"
    path.write_text("key")
    before = file_stamp(path)

    def changed() -> bool:  # at the next tick of the file system's clock
        path.chmod(0o644)
        return file_stamp(path) != before

    eventually(changed)
