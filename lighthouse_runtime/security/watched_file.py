"""A file whose content is read again when it changes, and kept as it was where the new one cannot be used."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lighthouse_protocol.refusals import InvalidRequest

T = TypeVar("T")

LOOKED_AT_EVERY_S = 0.5


class WatchedFile(Generic[T]):
    """`read` raises InvalidRequest, as this does when it is made."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        self._path = path
        self._read = read
        self._stamp = stamp_of(path)
        self._looked_at = time.monotonic()
        self._value = read()
        self.error = ""
        """Why the newest file is not used; what it held before stays valid."""

    @property
    def value(self) -> T:
        if time.monotonic() - self._looked_at >= LOOKED_AT_EVERY_S:
            self.look()
        return self._value

    def look(self) -> None:
        """Read the file if it has changed."""
        self._looked_at = time.monotonic()
        if (stamp := stamp_of(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._value, self.error = self._read(), ""
            except InvalidRequest as e:
                self.error = str(e)


def stamp_of(path: Path) -> tuple[int, int]:
    """Another one when the file has changed, by whatever way it is replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)


# -- tokens -------------------------------------------------------------------
#
# The tokens of a lighthouse: a file beside its certificates, which it reads again when it changes.
#
# Each role has one token or two: the newest, and the one before it, so that a rotation cuts nobody off. Their first
# letters tell a person what they are for; in logs a token is its role and six digits of its SHA-256.
