"""Typed clients of the lighthouse, synchronous and asyncio, one method per RPC. No torch.

Every method takes `timeout_s` and raises a refusal of lighthouse_protocol/refusals.py.
"""

from collections.abc import Sequence

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, LIGHTHOUSE_PORT
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.status import LighthouseStatus
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import metadata_of
from lighthouse_runtime.client.run import AsyncRunClient, RunClient
from lighthouse_runtime.client.streams import Session


def _lighthouse(address: str) -> str:
    """`address` with the default port where it names none."""
    parsed = parse_address(address, "lighthouse")
    return str(parsed) if parsed.port is not None else f"{parsed}:{LIGHTHOUSE_PORT}"


class LighthouseClient(RunClient):
    def __init__(
        self, address: str, *, job: str = DEFAULT_JOB, run: str = DEFAULT_RUN, token: str | None = None
    ) -> None:
        self.job = job
        super().__init__(_lighthouse(address), metadata_of(job, token, run))

    def quorum(self, participant: Participant, *, timeout_s: float) -> Quorum:
        """Ask to be in the next quorum and wait for it."""
        return self._run(rpcs.join(participant), timeout_s)

    def heartbeat(self, replica_id: str, incarnation: str = "", *, timeout_s: float = 5.0) -> None:
        self._run(rpcs.heartbeat(replica_id, incarnation), timeout_s)

    def status(self, job: str = "", *, ranks: bool = False, timeout_s: float = 5.0) -> LighthouseStatus:
        """Of `job`, or of every job; `ranks`: with the place of every rank."""
        return self._run(rpcs.lighthouse_status(job, ranks=ranks), timeout_s, wait_for_ready=False)

    def kill(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        """End a replica group through its manager."""
        self._run(rpcs.lighthouse_kill(self.job, replica_id, msg), timeout_s, wait_for_ready=False)

    def drain(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        """Ask a replica group to leave after the step that the others know of."""
        self._run(rpcs.lighthouse_drain(self.job, replica_id, msg), timeout_s, wait_for_ready=False)

    def incidents(self, job: str = "", *, timeout_s: float = 5.0) -> tuple[IncidentSummary, ...]:
        """Of `job`, or of every job, the newest first."""
        return self._run(rpcs.incidents(job), timeout_s, wait_for_ready=False)

    def incident(self, id: str, *, timeout_s: float = 10.0) -> Incident:
        """With its evidence."""
        return self._run(rpcs.incident(id), timeout_s, wait_for_ready=False)

    def stacks(self, ranks: Sequence[str] = (), *, timeout_s: float = 15.0) -> Gathered:
        """What these ranks (b/1), all of these replica groups (b), or all of the quorum are doing now."""
        return self._run(rpcs.stacks(self.job, ranks), timeout_s, wait_for_ready=False)


class AsyncLighthouseClient(AsyncRunClient):
    def __init__(
        self, address: str, *, job: str = DEFAULT_JOB, run: str = DEFAULT_RUN, token: str | None = None
    ) -> None:
        self.job = job
        super().__init__(_lighthouse(address), metadata_of(job, token, run))

    async def quorum(self, participant: Participant, *, timeout_s: float, wait_for_ready: bool = True) -> Quorum:
        """Ask to be in the next quorum and wait for it; without `wait_for_ready` raise Unreachable at once."""
        return await self._run(rpcs.join(participant), timeout_s, wait_for_ready)

    async def heartbeat(self, replica_id: str, incarnation: str = "", *, timeout_s: float = 5.0) -> None:
        await self._run(rpcs.heartbeat(replica_id, incarnation), timeout_s, wait_for_ready=False)

    async def status(self, job: str = "", *, ranks: bool = False, timeout_s: float = 5.0) -> LighthouseStatus:
        """Of `job`, or of every job; `ranks`: with the place of every rank."""
        return await self._run(rpcs.lighthouse_status(job, ranks=ranks), timeout_s, wait_for_ready=False)

    async def kill(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        """End a replica group through its manager."""
        await self._run(rpcs.lighthouse_kill(self.job, replica_id, msg), timeout_s, wait_for_ready=False)

    async def drain(self, replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> None:
        """Ask a replica group to leave after the step that the others know of."""
        await self._run(rpcs.lighthouse_drain(self.job, replica_id, msg), timeout_s, wait_for_ready=False)

    async def incidents(self, job: str = "", *, timeout_s: float = 5.0) -> tuple[IncidentSummary, ...]:
        """Of `job`, or of every job, the newest first."""
        return await self._run(rpcs.incidents(job), timeout_s, wait_for_ready=False)

    async def incident(self, id: str, *, timeout_s: float = 10.0) -> Incident:
        """With its evidence."""
        return await self._run(rpcs.incident(id), timeout_s, wait_for_ready=False)

    async def stacks(self, ranks: Sequence[str] = (), *, timeout_s: float = 15.0) -> Gathered:
        """What these ranks (b/1), all of these replica groups (b), or all of the quorum are doing now."""
        return await self._run(rpcs.stacks(self.job, ranks), timeout_s, wait_for_ready=False)

    def session(self, *, wait_for_ready: bool = False) -> Session:
        """Open one; the first message sent is a Hello. Without `wait_for_ready` its reader learns it at once when
        no server is there."""
        open_ = self._channel.stream_stream(rpcs.SESSION)
        return Session(open_(metadata=self._metadata, wait_for_ready=wait_for_ready), self.address)
