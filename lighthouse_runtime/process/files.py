"""The user's state folder, private files, and files that are read again when they change."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lighthouse_protocol.refusals import InvalidRequest


def state_folder(option: str) -> Path:
    """Return the path of our folder in the user's state directory (XDG). The folder may not exist.

    Raise InvalidRequest if the user has no home directory. The message names `option`, which sets a path explicitly.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise InvalidRequest("this user has no home directory; name a path", field=option) from None
    return folder / "lighthouse"


def make_private(folder: Path) -> None:
    """Create `folder` and its missing parents, accessible to this user only. Raise OSError on failure."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by this user only. Raise OSError on failure."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, so that they survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")
CHECKED_EVERY_S = 0.5


class WatchedFile(Generic[T]):
    """Parsed content of one or more files, at most CHECKED_EVERY_S old.

    If a new version of the files cannot be read or is invalid, the old content stays in use, `error` says why, and each
    check reads the files again. Otherwise `error` is empty.
    """

    def __init__(self, read: Callable[[], T], *paths: Path) -> None:
        """Read the files. `read` returns their parsed content, or raises InvalidRequest, OSError or ValueError."""
        self._paths = paths
        self._read = read
        self._stamp = file_stamp(*paths)
        self._checked_at = time.monotonic()
        self.current = read()  # without a check for a newer version
        self.error = ""

    @property
    def value(self) -> T:
        if time.monotonic() - self._checked_at >= CHECKED_EVERY_S:
            self.reload_if_changed()
        return self.current

    def reload_if_changed(self) -> None:
        self._checked_at = time.monotonic()
        stamp = file_stamp(*self._paths)
        try:
            if stamp != self._stamp:
                self.current, self._stamp = self._read(), stamp
            self.error = ""
        except (InvalidRequest, OSError, ValueError) as e:
            self.error = str(e)


def file_stamp(*paths: Path) -> tuple[tuple[int, int], ...]:
    """Return a value that changes whenever one of the files is modified or replaced, or gets other permissions."""
    stamps: list[tuple[int, int]] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps.append((0, 0))
        else:
            # The time of the last change to the file or its permissions. The inode detects a replacement within the
            # clock's resolution.
            stamps.append((found.st_ctime_ns, found.st_ino))
    return tuple(stamps)
