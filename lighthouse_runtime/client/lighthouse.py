"""Typed clients of the lighthouse, synchronous and asyncio, one method per RPC. No torch.

Every method takes `timeout_s` and raises a refusal of lighthouse_protocol/refusals.py. The job and the run are the
client's own; they go as metadata.
"""

from lighthouse_protocol.identity import parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, LIGHTHOUSE_PORT
from lighthouse_runtime.client import rpcs
from lighthouse_runtime.client.connection import AsyncClient, Method, SyncClient, metadata_of
from lighthouse_runtime.client.streams import AsyncRankStream, RankStream, Session, SupervisorStream


def _lighthouse(address: str) -> str:
    """`address` with the default port where it names none."""
    parsed = parse_address(address, "lighthouse")
    return str(parsed) if parsed.port is not None else f"{parsed}:{LIGHTHOUSE_PORT}"


class _LighthouseMethods:
    quorum = Method(rpcs.join)
    heartbeat = Method(rpcs.heartbeat)
    status = Method(rpcs.lighthouse_status)
    kill = Method(rpcs.lighthouse_kill)
    drain = Method(rpcs.lighthouse_drain)
    incidents = Method(rpcs.incidents)
    incident = Method(rpcs.incident)
    stacks = Method(rpcs.stacks)
    put_key = Method(rpcs.put_key)
    get_keys = Method(rpcs.get_keys)
    runs = Method(rpcs.runs)
    stop_run = Method(rpcs.stop_run)
    resume_run = Method(rpcs.resume_run)


class LighthouseClient(_LighthouseMethods, SyncClient):
    def __init__(
        self, address: str, *, job: str = DEFAULT_JOB, run: str = DEFAULT_RUN, token: str | None = None
    ) -> None:
        super().__init__(_lighthouse(address), metadata_of(job, token, run))

    def rank(self, *, wait_for_ready: bool = False) -> RankStream:
        """A rank's stream; the first message sent is a RankHello."""
        return self.open(rpcs.RANK, wait_for_ready)


class AsyncLighthouseClient(_LighthouseMethods, AsyncClient):
    """Without `wait_for_ready` the reader of a stream learns it at once when no server is there."""

    def __init__(
        self, address: str, *, job: str = DEFAULT_JOB, run: str = DEFAULT_RUN, token: str | None = None
    ) -> None:
        super().__init__(_lighthouse(address), metadata_of(job, token, run))

    def session(self, *, wait_for_ready: bool = False) -> Session:
        """A manager's session; the first message sent is a Hello."""
        return self.open(rpcs.SESSION, wait_for_ready)

    def rank(self, *, wait_for_ready: bool = False) -> AsyncRankStream:
        """A rank's stream; the first message sent is a RankHello."""
        return self.open(rpcs.RANK, wait_for_ready)

    def supervise(self, *, wait_for_ready: bool = False) -> SupervisorStream:
        """A supervisor's stream; the first message sent is a SupervisorHello."""
        return self.open(rpcs.SUPERVISE, wait_for_ready)
