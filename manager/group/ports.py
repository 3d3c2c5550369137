"""What the group's driver needs of others in the same daemon, beside lighthouse_runtime.ports."""

from typing import Protocol

from lighthouse_protocol.messages.evidence import SelfReport
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse
from manager.group.watches import Watch


class Link(Protocol):
    """The session with the lighthouse, opened again and again. What comes by it is told to the driver."""

    @property
    def error(self) -> str:
        """Why the lighthouse cannot be asked; empty: it can."""
        ...

    def send(self, message: ToLighthouse) -> None:
        """Nothing is sent while there is no session."""
        ...

    def give_up(self, reason: str) -> None:
        """End this connection; the next one is made at once."""
        ...

    def connect_beside(self, reason: str) -> None:
        """This connection may carry nothing any more: try others, and move to the first one that there is."""
        ...

    def stay(self) -> None:
        """No other connection is wanted."""
        ...


class EvidenceSource(Protocol):
    """Finds out what ranks are doing, and sends that to the lighthouse as it is found."""

    def opened(self, number: int, watch: Watch) -> None: ...

    def ended(self, watch: int) -> None: ...

    def heard(self, watch: int, group_rank: int) -> None:
        """The rank has sent something: it runs Python."""
        ...

    def answered(self, watch: int, own: SelfReport) -> None: ...

    def give(self, request: EvidenceRequest) -> None: ...

    def close(self) -> None: ...
