"""What happened to a job, for a person: the newest so many entries. No I/O.

What happens alike to several replica groups in the same moment is one entry: a thousand groups that come fill no page.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from lighthouse.members.rules.events import NOTES_KEPT
from lighthouse_protocol.messages.status import TimelineEntry, TimelineKind

NAMES = 16
TOGETHER_S = 1.0


class Timeline:
    def __init__(self, limit: int = NOTES_KEPT) -> None:
        self._entries: deque[TimelineEntry] = deque(maxlen=limit)

    def note(self, at_unix_s: float, kind: TimelineKind, replica_ids: Sequence[str], text: str = "") -> None:
        """It joins the newest entry if that says the same of others, a moment ago. Of many names the first are kept."""
        newest = self._entries[-1] if self._entries else None
        if newest is None or not _is_same(newest, at_unix_s, kind, text) or not replica_ids:
            names = tuple(replica_ids)
            self._entries.append(TimelineEntry(at_unix_s, kind, names[:NAMES], len(names[NAMES:]), text))
            return
        names = (*newest.replica_ids, *replica_ids)
        self._entries[-1] = replace(newest, replica_ids=names[:NAMES], more=newest.more + len(names[NAMES:]))

    @property
    def entries(self) -> tuple[TimelineEntry, ...]:
        """The newest last."""
        return tuple(self._entries)


def _is_same(newest: TimelineEntry, at_unix_s: float, kind: TimelineKind, text: str) -> bool:
    is_now = abs(at_unix_s - newest.at_unix_s) <= TOGETHER_S
    return is_now and (newest.kind, newest.text) == (kind, text) and bool(newest.replica_ids)
