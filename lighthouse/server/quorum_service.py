"""The lighthouse's RPCs: the documented service, under its own package and bare, and torchft's, on one port."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lighthouse.members.rules.roster import Member
from lighthouse.quorum.driver import JobDriver
from lighthouse.quorum.metrics import Counters
from lighthouse.quorum.registry import JobRegistry
from lighthouse.quorum.waiting_joins import Answer
from lighthouse.server.frames import SessionFrames, native_quorums, torchft_quorums
from lighthouse.server.lookup import job_of, live_member
from lighthouse_protocol import VERSION
from lighthouse_protocol.identity import check_name, read_identity
from lighthouse_protocol.limits import cut_reason
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.messages.session import DrainRequest, Hello, KillRequest, ToLighthouse
from lighthouse_protocol.messages.status import LighthouseStatus, StoreStatus, TimelineKind
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LighthouseError,
    NotServed,
    Unreachable,
    WrongState,
)
from lighthouse_protocol.rules.peer_limits import Resource
from lighthouse_protocol.wire import documented as wire
from lighthouse_protocol.wire.codecs import LIGHTHOUSE_STATUS
from lighthouse_protocol.wire.streams import SESSION_REQUESTS
from lighthouse_runtime.client.manager import AsyncManagerClient
from lighthouse_runtime.log_event import event
from lighthouse_runtime.server.future_reply import FutureReply
from lighthouse_runtime.server.peers import Peers
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method, Stream
from lighthouse_runtime.server.stream_peer import StreamPeer
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender
from lighthouse_runtime.timing.snapshots import Snapshots

log = logging.getLogger(__name__)

NATIVE, TORCHFT = native_quorums(), torchft_quorums()
TO_MANAGERS = SessionFrames()
REFLECTED = ("lighthouse.v1.LighthouseService", "torchft.LighthouseService")


class LighthouseService:
    def __init__(
        self,
        jobs: JobRegistry,
        counters: Counters,
        hello_within_s: float = FIRST_WITHIN_S,
        runs: Callable[[str], tuple[RunStatus, ...]] = lambda job: (),
        peers: Peers | None = None,
        *,
        is_insecure: bool = False,
        store: Callable[[], StoreStatus] = StoreStatus,
        http_port: Callable[[], int] = int,
    ) -> None:
        """`runs`: those of a job that have processes; of all jobs, if it is empty. `is_insecure` and `store`: for the
        status."""
        self._is_insecure = is_insecure
        self._store = store
        self._http_port = http_port
        self._jobs = jobs
        self._peers = peers or Peers()
        self._runs = runs
        self._hello_within_s = hello_within_s
        self._counters = counters
        self._started_at = time.monotonic()
        self._statuses = Snapshots(self._status_bytes)

    def services(self, more: Mapping[str, Entry] | None = None) -> Mapping[str, Mapping[str, Entry]]:
        """Handlers by service and method; `more`: those of run_service.py and incident_service.py."""
        documented: dict[str, Entry] = {
            "Quorum": Method(lighthouse_pb2.LighthouseQuorumRequest, self.quorum),
            "Heartbeat": Method(lighthouse_pb2.LighthouseHeartbeatRequest, self.heartbeat),
            "Status": Method(lighthouse_pb2.LighthouseStatusRequest, self.status_rpc),
            "Kill": Method(lighthouse_pb2.LighthouseKillRequest, self.kill),
            "Drain": Method(lighthouse_pb2.LighthouseDrainRequest, self.drain),
            "Session": Stream(SESSION_REQUESTS, self.session, self._lighten),
            **(more or {}),
        }
        torchft: dict[str, Entry] = {
            "Quorum": Method(torchft_pb2.LighthouseQuorumRequest, self.torchft_quorum),
            "Heartbeat": Method(torchft_pb2.LighthouseHeartbeatRequest, self.torchft_heartbeat),
        }
        return {
            "lighthouse.v1.LighthouseService": documented,
            "LighthouseService": documented,
            "torchft.LighthouseService": torchft,
        }

    async def quorum(self, request: lighthouse_pb2.LighthouseQuorumRequest, call: Call) -> bytes:
        return NATIVE.bytes_of(await self._join(lambda: wire.participant_from_native(_requester(request)), call))

    async def torchft_quorum(self, request: torchft_pb2.LighthouseQuorumRequest, call: Call) -> bytes:
        return TORCHFT.bytes_of(await self._join(lambda: wire.participant_from_torchft(_requester(request)), call))

    async def heartbeat(
        self, request: lighthouse_pb2.LighthouseHeartbeatRequest, call: Call
    ) -> lighthouse_pb2.LighthouseHeartbeatResponse:
        self._beat(request.replica_id, request.incarnation, call)
        return lighthouse_pb2.LighthouseHeartbeatResponse()

    async def torchft_heartbeat(
        self, request: torchft_pb2.LighthouseHeartbeatRequest, call: Call
    ) -> torchft_pb2.LighthouseHeartbeatResponse:
        self._beat(request.replica_id, "", call)
        return torchft_pb2.LighthouseHeartbeatResponse()

    async def status_rpc(self, request: lighthouse_pb2.LighthouseStatusRequest, call: Call) -> bytes:
        async with self._peers.read(call.peer):
            return self._statuses.of((request.job, request.ranks))

    async def kill(
        self, request: lighthouse_pb2.LighthouseKillRequest, call: Call
    ) -> lighthouse_pb2.LighthouseKillResponse:
        driver, member, reason = self._control(request, call)
        told = event("kill_asked", job=driver.job, replica_group=member.replica_id, peer=call.caller, reason=reason)
        log.warning("%s kills %s: %s", call.caller, member.replica_id, reason or "no reason given", extra=told)
        driver.note(TimelineKind.KILLED, (member.replica_id,), reason)
        why = f"by {call.caller}" + (f": {reason}" if reason else "")
        if not driver.tell(member, KillRequest(reason or f"killed {why}")):
            await self._kill(_manager_address(member), reason or f"killed {why}", call.time_left_s or 10.0)
        driver.killed(member, why)
        return lighthouse_pb2.LighthouseKillResponse()

    async def drain(
        self, request: lighthouse_pb2.LighthouseDrainRequest, call: Call
    ) -> lighthouse_pb2.LighthouseDrainResponse:
        driver, member, reason = self._control(request, call)
        told = event("drain_asked", job=driver.job, replica_group=member.replica_id, peer=call.caller, reason=reason)
        log.info("%s drains %s: %s", call.caller, member.replica_id, reason or "no reason given", extra=told)
        if not driver.tell(member, DrainRequest(reason or f"drained by {call.caller}")):
            raise WrongState(
                f"replica_id: {member.replica_id} holds no session, so it cannot be asked; kill it instead"
            )
        return lighthouse_pb2.LighthouseDrainResponse()

    def _control(
        self, request: lighthouse_pb2.LighthouseKillRequest | lighthouse_pb2.LighthouseDrainRequest, call: Call
    ) -> tuple[JobDriver, Member, str]:
        """The member and the reason in one line. Raises a refusal if the name is unknown."""
        check_name(request.replica_id)
        driver = self._jobs.find(job_of(call, request.job, request.replica_id))
        return driver, live_member(driver, request.replica_id), cut_reason(request.msg)

    async def session(self, requests: Requests[ToLighthouse], call: Call, sender: Sender) -> None:
        """A manager's session, until it ends."""
        hello = await requests.hello(Hello, self._hello_within_s)
        if hello is None:
            return
        driver = self._enter(hello.participant.replica_id, call)  # only now: a quiet job is forgotten
        number = driver.open_session(hello, StreamPeer(sender, TO_MANAGERS))
        try:
            async for message in requests:
                if message is not None:
                    driver.receive(number, message)
        finally:
            driver.end_session(number)

    def status(self, job: str = "", *, has_ranks: bool = False) -> LighthouseStatus:
        self._jobs.forget_quiet()
        ended = self._jobs.ended(job)
        drivers = list(self._jobs) if not job else [] if ended else [self._jobs.find(job)]
        uptime_s = time.monotonic() - self._started_at
        status = (*(driver.status(has_ranks=has_ranks) for driver in drivers), *ended)
        return LighthouseStatus(
            VERSION, uptime_s, status, self._runs(job), self._is_insecure, time.time(), self._store(), self._http_port()
        )

    def _status_bytes(self, asked: tuple[str, bool]) -> bytes:
        job, has_ranks = asked
        return LIGHTHOUSE_STATUS.write(self.status(job, has_ranks=has_ranks)).SerializeToString()

    async def _join(self, read: Callable[[], Participant], call: Call) -> Quorum:
        try:
            participant, time_left_s = read(), call.require_deadline()
            driver = self._enter(participant.replica_id, call)
        except LighthouseError as e:  # what the job refuses, its driver counts
            self._counters.refused(e)
            raise
        return (await self._answer(driver, participant, time_left_s)).quorum

    async def _answer(self, driver: JobDriver, participant: Participant, time_left_s: float) -> Answer:
        reply: FutureReply[Answer] = FutureReply()
        number = driver.join(participant, time_left_s, reply)
        try:
            return await reply.value
        finally:
            driver.withdraw(number)

    def _beat(self, wire_id: str, incarnation: str, call: Call) -> None:
        name, told = read_identity(wire_id, incarnation)
        self._jobs.get_reported(job_of(call, replica_id=name)).beat(name, told)

    def _lighten(self, request: lighthouse_pb2.SessionRequest, call: Call) -> None:
        """Where ranks are is for people to see: a heartbeat of a peer that shows too many is taken without."""
        ranks = len(request.heartbeat.progress.ranks)
        if ranks and not self._peers.may_take(call.peer, Resource.RANKS_SHOWN, ranks):
            request.heartbeat.ClearField("progress")

    def _enter(self, replica_id: str, call: Call) -> JobDriver:
        """The job that the caller comes to as that group. What is new here counts for the caller. Raises a refusal."""
        job = job_of(call, replica_id=replica_id)
        driver = self._jobs.peek(job)
        if driver is None:
            self._peers.take(call.peer, Resource.JOBS)
        if driver is None or driver.member(replica_id) is None:
            self._peers.take(call.peer, Resource.REPLICA_IDS)
        return self._jobs.get(job)

    async def _kill(self, address: str, msg: str, time_left_s: float) -> None:
        """A manager that goes away while it is told has done what it was told."""
        timeout_s = max(0.1, time_left_s / 3)
        async with AsyncManagerClient(address) as manager:
            await manager.connect(timeout_s)
            try:
                await manager.kill(msg, timeout_s=timeout_s)
            except NotServed:
                await _unless_gone(manager.torchft_kill(msg, timeout_s=timeout_s))
            except Unreachable:
                return


async def _unless_gone(telling: Awaitable[None]) -> None:
    try:
        await telling
    except Unreachable:
        return


def _requester(request: Any) -> Any:
    if not request.HasField("requester"):
        raise InvalidRequest("is missing; say who asks", field="requester")
    return request.requester


def _manager_address(member: Member) -> str:
    if member.participant is None or not member.participant.address:
        raise WrongState(f"address: {member.replica_id} has advertised no manager to kill it through")
    return member.participant.address
