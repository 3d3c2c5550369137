"""What the group's driver needs of others in the same daemon."""

from collections.abc import Callable
from typing import Protocol

from lighthouse_protocol.messages.evidence import SelfReport
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import EvidenceRequest, ToLighthouse
from manager.group.watches import Watch


class LighthousePort(Protocol):
    """The session with the lighthouse, and the connection that carries it.

    A new session is the driver's `opened`, a message `received`, the end of a session `closed`; after it the next one
    is opened for as long as the driver lives.
    """

    @property
    def error(self) -> str:
        """Why the lighthouse cannot be asked; empty: it can."""
        ...

    def send(self, message: ToLighthouse) -> None:
        """On the present session; without one, nothing happens."""
        ...

    def give_up(self, reason: str) -> None:
        """End this connection and make another."""
        ...

    def connect_beside(self, reason: str) -> None:
        """Make a second connection and move the session there once there is one."""
        ...

    def stay(self) -> None:
        """No second connection is needed."""
        ...


class EvidenceSource(Protocol):
    """Finds out what ranks are doing, and sends that to the lighthouse as it is found."""

    def opened(self, watch: Watch) -> None: ...

    def ended(self, watch: Watch) -> None: ...

    def answered(self, watch: Watch, own: SelfReport) -> None: ...

    def give(self, request: EvidenceRequest, view: Callable[[], GroupView]) -> None:
        """`view`: where the ranks are, once all is found."""
        ...

    def close(self) -> None: ...
