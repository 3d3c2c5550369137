"""What the group's driver needs of others in the same daemon."""

from typing import Protocol

from lighthouse_protocol.messages.evidence import SelfReport
from lighthouse_protocol.messages.session import EvidenceRequest, WatchRequest
from lighthouse_runtime.server.streams import Sender


class EvidenceSource(Protocol):
    """Finds out what ranks are doing, and sends that to the lighthouse as it is found."""

    def opened(self, watch: int, request: WatchRequest, sender: Sender, *, is_here: bool) -> None: ...

    def ended(self, watch: int) -> None: ...

    def heard(self, watch: int, group_rank: int) -> None:
        """The rank has sent something: it runs Python."""
        ...

    def answered(self, watch: int, own: SelfReport) -> None: ...

    def give(self, request: EvidenceRequest) -> None: ...

    def close(self) -> None: ...
