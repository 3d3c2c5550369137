"""Parsed content of a file, reread when the file changes."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lighthouse_protocol.refusals import InvalidRequest

T = TypeVar("T")

CHECKED_EVERY_S = 0.5


class WatchedFile(Generic[T]):
    """Parsed content of a file, at most CHECKED_EVERY_S old. If a new version is invalid, the old content stays."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        """Read the file.

        Args:
            path: The file.
            read: Reads and parses the file. Raises InvalidRequest if it is invalid.

        Raises:
            InvalidRequest: The file is invalid.
        """
        self._path = path
        self._read = read
        self._stamp = file_stamp(path)
        self._checked_at = time.monotonic()
        self._value = read()
        self.error = ""  # why the newest version is not used

    @property
    def value(self) -> T:
        if time.monotonic() - self._checked_at >= CHECKED_EVERY_S:
            self.reload_if_changed()
        return self._value

    def reload_if_changed(self) -> None:
        """Read the file if it has changed."""
        self._checked_at = time.monotonic()
        if (stamp := file_stamp(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._value, self.error = self._read(), ""
            except InvalidRequest as e:
                self.error = str(e)


def file_stamp(path: Path) -> tuple[int, int]:
    """Return a value that changes whenever the file is modified or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    # Modification time and inode: the latter detects a replacement within the clock's resolution.
    return (found.st_mtime_ns, found.st_ino)
