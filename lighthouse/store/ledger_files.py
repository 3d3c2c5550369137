"""Files of the ledger (lighthouse/job/ledger.py), one per day (UTC), in the folder of the incident files.

A group takes about 130 bytes every five minutes, so 300 groups fill MAX_FOLDER_BYTES in 6 weeks. Then the oldest days
are deleted. Training does not depend on these files, so a write error is logged once and ignored.
"""

import logging
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.files import make_private

log = logging.getLogger(__name__)

MAX_FOLDER_BYTES = 512 * 1024 * 1024
PAGE_BYTES = 1024 * 1024
_FILE = re.compile(r"ledger-(\d{8})\.jsonl")
_PAGE = re.compile(r"(\d{8})(?::(\d{1,15}))?")


class LedgerFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_failed = False

    def append(self, lines: Sequence[str], unix_s: float) -> None:
        """Append lines to the file for the day of `unix_s`, on the calling thread. Errors are logged."""
        if not lines:
            return
        try:
            make_private(self.folder)
            path = self._path(f"{datetime.fromtimestamp(unix_s, UTC):%Y%m%d}")
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as file:
                size = file.tell()
                is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # a crash cut off the last line
                file.write(b"\n" * is_torn + "".join(f"{line}\n" for line in lines).encode())
            self._prune()
            self._has_failed = False
        except OSError as e:
            if not self._has_failed:
                fields = event("ledger_not_saved", folder=str(self.folder))
                log.warning("the ledger was not saved: %s; set --incident-dir to a writable folder", e, extra=fields)
            self._has_failed = True

    def read(self, page: str) -> tuple[list[str], str]:
        """Return a page of lines, about PAGE_BYTES long, and the name of the next page (empty after the last).

        Args:
            page: Name of a page from an earlier call, the first day to read (20261129), or "" for the oldest page.

        Raises:
            InvalidRequest: If `page` is malformed, or the files cannot be read.
        """
        named = _PAGE.fullmatch(page or "00000000")
        if named is None:
            raise InvalidRequest(f"{page!r} is not a page of the ledger, for example 20261129", field="page")
        try:
            days = [day for day in self.days() if day >= named[1]]
            if not days:
                return [], ""
            offset = int(named[2] or 0) if days[0] == named[1] else 0
            with self._path(days[0]).open("rb") as file:
                file.seek(offset)
                body = file.read(PAGE_BYTES)
                body += file.readline()
                is_end = not file.read(1)
        except OSError as e:
            raise InvalidRequest(f"the ledger cannot be read: {e}") from e
        following = f"{days[0]}:{offset + len(body)}" if not is_end else "".join(days[1:2])
        return body.decode(errors="replace").splitlines(), following

    def days(self) -> list[str]:
        """Return the days that have a file, as YYYYMMDD, oldest first. Raise OSError if the folder cannot be read."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []  # nothing has been written yet
        return sorted(found[1] for name in names if (found := _FILE.fullmatch(name)) is not None)

    def _path(self, day: str) -> Path:
        return self.folder / f"ledger-{day}.jsonl"

    def _prune(self) -> None:
        days = self.days()
        sizes = [self._path(day).stat().st_size for day in days]
        for i, day in enumerate(days[:-1]):
            if sum(sizes[i:]) > MAX_FOLDER_BYTES:
                self._path(day).unlink(missing_ok=True)
