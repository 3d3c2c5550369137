"""Where a job's records are kept."""

from collections.abc import Mapping
from typing import Protocol

from lighthouse.quorum.rules.record import QuorumRecord


class JobStore(Protocol):
    """Where records are kept: a file (journal.py), nowhere (NoMemory).

    Every method may raise WrongState or InvalidRequest that names what to do. All but `claim` and `release` need the
    claim.
    """

    def claim(self) -> int:
        """Take it for this process, and return the term: 1 for the first claim ever, then 2, 3, ...

        Raises WrongState naming the holder where another lighthouse has it.
        """
        ...

    def load(self) -> Mapping[str, QuorumRecord]:
        """All records by job, the forgotten ones (quorum None) too."""
        ...

    def last_id(self, job: str) -> int:
        """Every quorum_id of this job from here on must be higher; 0 where nothing is known."""
        ...

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Durable when it returns. When it raises, the record may have been kept or not; commit again, or end."""
        ...

    def forget(self, job: str) -> None:
        """A job that has gone quiet: only its highest id is kept."""
        ...

    def release(self) -> None:
        """Give the claim back. Without a claim: nothing."""
        ...


class NoJobStore:
    """Keeps nothing: `--journal none`."""

    def claim(self) -> int:
        return 0

    def load(self) -> Mapping[str, QuorumRecord]:
        return {}

    def last_id(self, job: str) -> int:
        return 0

    def commit(self, job: str, record: QuorumRecord) -> None:
        pass

    def forget(self, job: str) -> None:
        pass

    def release(self) -> None:
        pass
