"""What healing needs of the step that owns the state: where it is, and that it is being taken over."""

from typing import Protocol

from lighthouse_protocol.messages.membership import Tag


class Share(Protocol):
    @property
    def divisor(self) -> int: ...


class StateOwner(Protocol):
    step: int
    tag_quorum_id: int | None
    batches_committed: int
    must_install: bool
    is_torn: bool

    @property
    def tag(self) -> Tag: ...

    @property
    def share(self) -> Share: ...

    def work_at(self, step: int, tag_quorum_id: int | None) -> None: ...

    def installing(self) -> None:
        """The state is being overwritten: it is torn until `installed`."""
        ...

    def installed(self, step: int, tag_quorum_id: int | None, batches_committed: int) -> None: ...
