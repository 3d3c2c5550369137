"""Those at the other end of a stream or a call, who only listen, and the owner of a run without a job."""

from typing import Generic, TypeVar

from lighthouse.job.records import Membership
from lighthouse_protocol.messages.incident import Incident, RankEvidence
from lighthouse_protocol.refusals import LighthouseError

T = TypeVar("T")


class Listener:
    """A Peer."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.is_ended = False
        self.error: LighthouseError | None = None

    def send(self, message: object) -> None:
        self.messages.append(message)

    def end(self, error: LighthouseError | None = None) -> None:
        self.is_ended, self.error = True, error


class Caller(Generic[T]):
    """A Reply."""

    def __init__(self) -> None:
        self.answers: list[T] = []
        self.errors: list[LighthouseError] = []

    def answer(self, value: T) -> None:
        self.answers.append(value)

    def refuse(self, error: LighthouseError) -> None:
        self.errors.append(error)


class NoJobs:
    """A RunOwner."""

    def record_run_incident(self, incident: Incident) -> None:
        pass

    def handle_run_message(self, job: str) -> None:
        pass

    def membership(self, job: str, replica_id: str, digest: str) -> Membership:
        return Membership.OPEN

    def report_exit(self, job: str, replica_id: str, reason: str, evidence: RankEvidence) -> bool:
        return False
