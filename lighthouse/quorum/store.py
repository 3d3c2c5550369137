"""Where a job's records are kept."""

from collections.abc import Mapping
from typing import Protocol

from lighthouse.quorum.rules.record import QuorumRecord

FORGOTTEN_JOBS = 1000
"""Of so many jobs that have gone quiet the last ids are kept one by one; of all others, the highest."""


class JobStore(Protocol):
    """Where records are kept: a file (journal/journal.py), etcd (etcd/store.py), nowhere (NoJobStore).

    One lighthouse has it at a time. Every method may raise WrongState, InvalidRequest or NotLeader that names what to
    do, without it too.
    """

    def load(self) -> Mapping[str, QuorumRecord]:
        """All records by job, the forgotten ones (quorum None) too."""
        ...

    def last_id(self, job: str) -> int:
        """Every quorum_id of this job from here on must be higher; 0 where nothing is known."""
        ...

    def commit(self, job: str, record: QuorumRecord) -> None:
        """Nothing that is said from here on leaves this process before the record is durable: it is when this returns,
        or what is said is held until then (OutputGate). When it raises, the record may have been kept or not; commit
        again, or end."""
        ...

    def forget(self, job: str) -> None:
        """A job that has gone quiet: only its highest id is kept."""
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

    def release(self, *, is_unused: bool = False) -> None:
        pass
