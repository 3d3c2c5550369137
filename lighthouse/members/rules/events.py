"""What happens to the members of a job."""

from dataclasses import dataclass

from lighthouse_protocol.messages.status import TimelineKind


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be told of one replica group, by whoever sees it happen and knows no time of day."""

    kind: TimelineKind
    replica_id: str
    text: str = ""
