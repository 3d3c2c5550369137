"""What happens to the members of a job."""

from dataclasses import dataclass

from lighthouse_protocol.messages.status import TimelineKind

NOTES_KEPT = 500


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be told of one replica group, by whoever sees it happen and knows no time of day."""

    kind: TimelineKind
    replica_id: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a member of that quorum. `last_seen_at`: its last sign of life; None: it was there until now."""

    replica_id: str
    quorum_id: int
    reason: str
    last_seen_at: float | None = None
