"""Files of the ledger: one per day (UTC), to which lines are appended. They lie beside the files of the incidents.

A line of 300 groups takes about 20 kB and is written every five minutes, so a week takes 40 MB. The oldest days are
deleted above MAX_FOLDER_BYTES. Training does not depend on these files: an error is logged once.
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

MAX_FOLDER_BYTES = 256 * 1024 * 1024
PAGE_BYTES = 1024 * 1024
_PAGE = re.compile(r"(\d{8})(?::(\d{1,15}))?")


class LedgerFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_failed = False

    def append(self, lines: Sequence[str], unix_s: float) -> None:
        """Write lines to the file of the day. Blocks."""
        if not lines:
            return
        try:
            make_private(self.folder)
            path = self.folder / f"ledger-{datetime.fromtimestamp(unix_s, UTC):%Y%m%d}.jsonl"
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as file:
                size = file.tell()
                is_torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # by a crash
                file.write(b"\n" * is_torn + "".join(f"{line}\n" for line in lines).encode())
            self._prune()
            self._has_failed = False
        except OSError as e:
            if not self._has_failed:
                log.warning(
                    "the ledger was not saved: %s; set --incident-dir to a writable folder",
                    e,
                    extra=event("ledger_not_saved", folder=str(self.folder)),
                )
            self._has_failed = True

    def read(self, page: str) -> tuple[list[str], str]:
        """Return up to PAGE_BYTES of lines and the name of the next page, "" after the last one. Blocks.

        Args:
            page: `next` of the previous page, or a day to begin with, or "" for the oldest page.

        Raises:
            InvalidRequest: `page` has another form.
            OSError: The file cannot be read.
        """
        named = _PAGE.fullmatch(page) if page else None
        if page and named is None:
            raise InvalidRequest(
                f"{page!r} is not a page of the ledger; write a day, for example 20261129", field="page"
            )
        day, offset = (named[1], int(named[2] or 0)) if named else ("", 0)
        days = [each for each in self.days() if each >= day]
        if not days:
            return [], ""
        if days[0] != day:
            offset = 0
        with self._path(days[0]).open("rb") as file:
            file.seek(offset)
            body = file.read(PAGE_BYTES)
            body += file.readline() if not body.endswith(b"\n") else b""
            is_end = file.read(1) == b""
        following = f"{days[0]}:{offset + len(body)}" if not is_end else days[1] if len(days) > 1 else ""
        return body.decode(errors="replace").splitlines(), following

    def days(self) -> list[str]:
        """Return the days that have a file, the oldest first."""
        return sorted(path.stem.removeprefix("ledger-") for path in self.folder.glob("ledger-????????.jsonl"))

    def _path(self, day: str) -> Path:
        return self.folder / f"ledger-{day}.jsonl"

    def _prune(self) -> None:
        sizes = {day: self._path(day).stat().st_size for day in self.days()}
        for day in list(sizes)[:-1]:
            if sum(sizes.values()) <= MAX_FOLDER_BYTES:
                break
            self._path(day).unlink(missing_ok=True)
            del sizes[day]
