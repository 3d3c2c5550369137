"""gRPC services of the lighthouse.

`LighthouseService` serves joins, heartbeats, manager sessions, status, kill and drain. One port serves it under three
names: `lighthouse.v1.LighthouseService`, `LighthouseService`, and `torchft.LighthouseService` with torchft's messages.
`RunService` and `IncidentService` add the RPCs of runs and incidents. The handlers check the caller's permissions and
limits, then pass the request to the driver of the job or run. The rules are in lighthouse/job.
"""

import asyncio
import copy
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from lighthouse.job.driver import Answer, JobDriver
from lighthouse.job.incident_driver import IncidentRegistry
from lighthouse.job.incidents import check_ranks, read_ranks
from lighthouse.job.ledger import Ledger
from lighthouse.job.records import Group
from lighthouse.job.registry import JobRegistry, RunRegistry
from lighthouse.job.run_driver import RunDriver
from lighthouse.server.metrics import Counters
from lighthouse.store.ledger_files import LedgerFiles
from lighthouse_protocol import VERSION
from lighthouse_protocol.identity import check_name, group_of_supervisor, read_identity
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, JOB_METADATA_KEY, RUN_METADATA_KEY, cut_reason
from lighthouse_protocol.messages.incident import Gathered, Incident
from lighthouse_protocol.messages.membership import Participant, Quorum, QuorumChange
from lighthouse_protocol.messages.run import (
    FromRunRank,
    FromSupervisor,
    HostExcluded,
    Key,
    Keys,
    RankHello,
    StopAsked,
    SupervisorHello,
    check_kind,
)
from lighthouse_protocol.messages.session import (
    DrainRequest,
    Hello,
    JoinAccepted,
    KillRequest,
    QuorumChanged,
    ToLighthouse,
    ToManager,
)
from lighthouse_protocol.messages.status import LighthouseStatus, StoreStatus, TimelineKind
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.pb.extensions import incident_pb2 as incident_pb
from lighthouse_protocol.pb.extensions import run_pb2 as pb
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.refusals import (
    InvalidRequest,
    LighthouseError,
    NotServed,
    UnknownName,
    Unreachable,
    WrongState,
)
from lighthouse_protocol.rules.access import check_bounds, check_bounds_on_run
from lighthouse_protocol.rules.rate_limits import Resource
from lighthouse_protocol.wire import documented as wire
from lighthouse_protocol.wire.codec import GATHERED, INCIDENT, INCIDENT_SUMMARY, KEYS, LIGHTHOUSE_STATUS, RUN_STATUS
from lighthouse_protocol.wire.streams import (
    RANK_REQUESTS,
    RANK_RESPONSES,
    SESSION_REQUESTS,
    SESSION_RESPONSES,
    SUPERVISOR_REQUESTS,
    SUPERVISOR_RESPONSES,
    accepted_for,
    accepted_shared,
    changed_for,
    changed_shared,
)
from lighthouse_runtime.client.clients import AsyncManagerClient
from lighthouse_runtime.log_event import event
from lighthouse_runtime.net.outbox import Body
from lighthouse_runtime.security.access import Audit
from lighthouse_runtime.server.grpc_server import Call, Entry, FutureReply, Method, Peers, Stream
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Frames, Requests, Sender, StreamPeer
from lighthouse_runtime.timing.pacing import Snapshots

log = logging.getLogger(__name__)


def job_named(call: Call) -> str:
    """Return the job that a read-only call names in its metadata, or the default job.

    A caller whose credential is bound to one job may read other jobs, too.
    """
    return call.metadata.get(JOB_METADATA_KEY) or DEFAULT_JOB


def job_of(call: Call, named: str = "", replica_id: str = "") -> str:
    """Return the job on which a call acts, after checking that the caller may act on it.

    Args:
        call: The call.
        named: Job in the request. If empty, the call's metadata names the job.
        replica_id: Replica group on which, or for which, the call acts. Empty if there is none.

    Raises:
        NotPermitted: If the caller is bound to another job or group.
    """
    job = named or job_named(call)
    check_bounds(call.principal, job, replica_id)
    return job


def live_member(driver: JobDriver, replica_id: str) -> Group:
    member = driver.find_member(replica_id)
    if member is None or not member.is_alive:
        alive = ", ".join(sorted(m.replica_id for m in driver.machine.job.groups.values() if m.is_alive)[:16]) or "none"
        raise UnknownName(f"no live replica group {replica_id!r}; alive: {alive}")
    return member


TO_RANKS = Frames(RANK_RESPONSES.write)
TO_SUPERVISORS = Frames(SUPERVISOR_RESPONSES.write)
NO_PART = "this supervisor does not take part in the run, so its request affects only itself"
ALREADY = "the run has ended, or the host is already excluded"


class RunService:
    def __init__(
        self,
        runs: RunRegistry,
        audit: Audit | None = None,
        entry_within_s: float = FIRST_WITHIN_S,
        peers: Peers | None = None,
    ) -> None:
        self._audit = audit or Audit(None)
        self._runs = runs
        self._peers = peers or Peers()
        self._entry_within_s = entry_within_s
        self._statuses = Snapshots[tuple[str, str], bytes]()

    def methods(self) -> Mapping[str, Entry]:
        return {
            "Rank": Stream(RANK_REQUESTS, self.rank),
            "Supervise": Stream(SUPERVISOR_REQUESTS, self.supervise),
            "PutKey": Method(pb.PutKeyRequest, self.put_key),
            "GetKeys": Method(pb.GetKeysRequest, self.get_keys),
            "Runs": Method(pb.RunsRequest, self.runs),
            "StopRun": Method(pb.StopRunRequest, self.stop_run),
            "ResumeRun": Method(pb.ResumeRunRequest, self.resume_run),
        }

    async def rank(self, requests: Requests[FromRunRank], call: Call, sender: Sender) -> None:
        entry = await requests.read_hello(RankHello, self._entry_within_s)
        if entry is None:
            return
        driver = self._get(call)
        session = driver.open_rank(entry, StreamPeer(sender, TO_RANKS))
        try:
            async for message in requests:
                if message is not None:
                    driver.receive_from_rank(session, message)
        finally:
            driver.end_rank(session)

    async def supervise(self, requests: Requests[FromSupervisor], call: Call, sender: Sender) -> None:
        entry = await requests.read_hello(SupervisorHello, self._entry_within_s)
        if entry is None:
            return
        job_of(call, replica_id=_group_of(entry, call))
        driver = self._get(call)
        session = driver.open_supervisor(entry, StreamPeer(sender, TO_SUPERVISORS))
        try:
            async for message in requests:
                if message is None:
                    continue
                if isinstance(message, StopAsked | HostExcluded):
                    self._audit_request(call, driver, entry, message, driver.can_stop_run(session))
                driver.receive_from_supervisor(session, message)
        finally:
            driver.end_supervisor(session)

    def _audit_request(
        self,
        call: Call,
        driver: RunDriver,
        entry: SupervisorHello,
        asked: StopAsked | HostExcluded,
        can_stop_run: bool,
    ) -> None:
        """Record a supervisor's request in the audit log: as an action if it changes the run, else as a refusal."""
        what = type(asked).__name__
        target = f"job={driver.name[0]}, run={driver.name[1]}, by={entry.name}, reason={asked.reason}"
        if can_stop_run and driver.is_changed_by(entry, asked):
            self._audit.act(call.principal, call.caller, what, target)
        else:
            self._audit.refuse(call.principal, call.caller, what, ALREADY if can_stop_run else NO_PART, target)

    def _get(self, call: Call) -> RunDriver:
        """Return the driver of the run that a process joins.

        Count the process, and the run if it is new, against the limits of the client's address.
        """
        self._peers.charge(call.peer, Resource.PROCESSES)
        if not self._runs.has_processes(*_named(call)):
            self._peers.charge(call.peer, Resource.RUNS)
        return self._runs.get_run_driver(*_named(call))

    async def put_key(self, request: pb.PutKeyRequest, call: Call) -> pb.PutKeyResponse:
        self._peers.charge(call.peer, Resource.DURABLE_WRITES)
        driver = self._runs.find_run_driver(*_named(call))
        driver.put_key(
            request.generation,
            check_kind(request.kind),
            request.name,
            request.value,
            slot=request.slot,
            secret=request.secret,
        )
        return pb.PutKeyResponse()

    async def get_keys(self, request: pb.GetKeysRequest, call: Call) -> bytes:
        async with self._peers.expensive_read(call.peer):
            return self._keys(request, call).SerializeToString()

    def _keys(self, request: pb.GetKeysRequest, call: Call) -> pb.GetKeysResponse:
        kind = check_kind(request.kind) if request.kind else None
        keys = self._runs.find_run_driver(*_named(call)).machine.keys
        fence = request.generation if request.HasField("generation") else None
        if request.previous:
            values = keys.previous_keys(fence)
        else:
            values = keys.keys_of(request.of, fence) if request.HasField("of") else keys.present_keys(fence)
        found = (Key(*key, value) for key, value in values.items())
        wanted = (key for key in found if kind in (None, key.kind) and request.name in ("", key.name))
        return KEYS.write(Keys(keys.number, tuple(wanted)))

    async def runs(self, request: pb.RunsRequest, call: Call) -> bytes:
        job, run = job_named(call), request.run

        def write() -> bytes:
            return pb.RunsResponse(runs=map(RUN_STATUS.write, self._runs.run_statuses(job, run))).SerializeToString()

        async with self._peers.expensive_read(call.peer):
            return self._statuses.get((job, run), write)

    async def stop_run(self, request: pb.StopRunRequest, call: Call) -> pb.StopRunResponse:
        check_bounds_on_run(call.principal, job_named(call), "StopRun")
        driver = self._runs.find_run_driver(*_named(call))
        if driver.machine.completed is not None:
            raise WrongState(f"run: {driver.name[1]} is completed; there is nothing to stop")
        driver.request_stop(cut_reason(request.reason) or "stopping", f"operator at {call.caller}")
        return pb.StopRunResponse()

    async def resume_run(self, _: pb.ResumeRunRequest, call: Call) -> pb.ResumeRunResponse:
        check_bounds_on_run(call.principal, job_named(call), "ResumeRun")
        self._runs.find_run_driver(*_named(call)).request_resume()
        return pb.ResumeRunResponse()


def _named(call: Call) -> tuple[str, str]:
    """Return the job and the run that a call names. Raise NotPermitted if the caller is bound to another job."""
    return job_of(call), call.metadata.get(RUN_METADATA_KEY) or DEFAULT_RUN


def _group_of(entry: SupervisorHello, call: Call) -> str:
    """Return the replica group for which a supervisor acts, to check the caller's permission.

    A supervisor's name such as a/1 may stand for host 1 of group a or for group a/1. It stands for group a if the
    caller's credential is bound to a.
    """
    group = group_of_supervisor(entry.name)
    return group if group == call.principal.replica_id else entry.name


class IncidentService:
    def __init__(self, jobs: JobRegistry, registry: IncidentRegistry, ledger: LedgerFiles | None = None) -> None:
        self._jobs = jobs
        self._registry = registry
        self._ledger = ledger
        self._ledger_lock = asyncio.Lock()  # while lines are being written, they are neither in memory nor in a file
        self._unwritten = Snapshots[int, list[str]]()  # lines since the last write, by the number of writes before
        self._writes = 0

    def methods(self) -> Mapping[str, Entry]:
        return {
            "Incidents": Method(incident_pb.IncidentsRequest, self.incidents),
            "Incident": Method(incident_pb.IncidentRequest, self.incident),
            "Ledger": Method(incident_pb.LedgerRequest, self.ledger),
            "Stacks": Method(incident_pb.StacksRequest, self.stacks),
        }

    async def incidents(self, request: incident_pb.IncidentsRequest, _: Call) -> incident_pb.IncidentsResponse:
        job = check_name(request.job, "job") if request.job else ""
        return incident_pb.IncidentsResponse(
            incidents=map(INCIDENT_SUMMARY.write, self._registry.archive.summaries(job))
        )

    async def incident(self, request: incident_pb.IncidentRequest, call: Call) -> incident_pb.IncidentResponse:
        return incident_pb.IncidentResponse(incident=INCIDENT.write(self.find(request.id, call)))

    def find(self, name: str, call: Call) -> Incident:
        """Return the incident with the id `name`.

        Raises:
            UnknownName: If there is no such incident.
            NotPermitted: If the caller is bound to another job.
        """
        found = self._registry.archive.get_incident(name)
        job_of(call, found.summary.job)
        return found

    async def ledger(self, request: incident_pb.LedgerRequest, _: Call) -> incident_pb.LedgerResponse:
        prefix = f'{{"job":{json.dumps(check_name(request.job, "job"))},' if request.job else ""
        if self._ledger is None:
            raise NotServed("this lighthouse keeps no ledger; start it with --journal or --incident-dir")
        async with self._ledger_lock:
            lines, following = await asyncio.to_thread(self._ledger.read, request.page)
            if not following:
                lines += self._unwritten.get(self._writes, self._unwritten_lines)
        return incident_pb.LedgerResponse(lines=[line for line in lines if line.startswith(prefix)], next=following)

    def _unwritten_lines(self) -> list[str]:
        return copy.deepcopy(self._registry.ledger).take_lines(self._jobs.ports.timers.time(), time.time())

    async def write_ledger(self, ledger: Ledger | None = None) -> None:
        """Write the lines of `ledger`, by default the current one, to the files. Drop the lines if there are none."""
        async with self._ledger_lock:
            now = time.time()
            lines = (ledger or self._registry.ledger).take_lines(self._jobs.ports.timers.time(), now)
            self._writes += 1
            if self._ledger is not None:
                await asyncio.to_thread(self._ledger.append, lines, now)

    async def stacks(self, request: incident_pb.StacksRequest, call: Call) -> incident_pb.StacksResponse:
        return GATHERED.write(await self.gather(request.job, request.ranks, call))

    async def gather(self, job: str, of_ranks: Iterable[str], call: Call) -> Gathered:
        """Collect evidence, such as stacks and process states, from ranks of a job.

        Args:
            job: The job. If empty, the call's metadata names the job.
            of_ranks: Ranks (`b/1`), replica groups or runs (`b`). If empty, all ranks of the quorum or, without a
                quorum, of the job's runs.
            call: The call.

        Raises:
            LighthouseError: If the caller lacks permission, or a name is unknown.
        """
        driver, ranks = self._jobs.find_job(job_of(call, job)), read_ranks(of_ranks)
        found: dict[str, tuple[int, ...]] = {}
        for name, of in (ranks or {}).items():
            if (run := driver.find_run(name)) is not None and driver.find_member(name) is None:
                check_ranks(name, of, run.machine.generations.terms.world_size)
                found[name] = of
                continue
            member = live_member(driver, check_name(name))
            check_ranks(member.replica_id, of, member.participant.group_world_size if member.participant else 0)
            found[member.replica_id] = of
        reply = FutureReply[Gathered]()
        driver.incidents.gather_evidence(found or None, reply)
        return await reply.value


# -- serialised messages: each is serialised once for all clients


class SessionFrames(Frames[ToManager]):
    """Serialiser of messages to managers.

    Many sessions receive the same quorum, each with its own join number. The quorum is serialised once, and only the
    number is serialised for each session.
    """

    def __init__(self) -> None:
        super().__init__(SESSION_RESPONSES.write)
        self._quorum: Quorum | None = None
        self._shared = b""
        self._change: QuorumChange | None = None
        self._shared_change = b""

    def encode(self, message: ToManager) -> Body:
        if isinstance(message, QuorumChanged):
            if message.change is not self._change:
                self._change, self._shared_change = message.change, changed_shared(message)
            return self._shared_change, changed_for(message.join)
        if not isinstance(message, JoinAccepted):
            return self.to_bytes(message)
        if message.quorum is not self._quorum:
            self._quorum = message.quorum
            self._shared = accepted_shared(message.quorum, message.stands, time.time(), message.secret)
        return self._shared, accepted_for(b"", message.join)


NATIVE: Frames[Quorum] = Frames(lambda quorum: wire.quorum_to_native(quorum, time.time()))
TORCHFT: Frames[Quorum] = Frames(lambda quorum: wire.quorum_to_torchft(quorum, time.time()))
TO_MANAGERS = SessionFrames()
REFLECTED = ("lighthouse.v1.LighthouseService", "torchft.LighthouseService")


class LighthouseService:
    def __init__(
        self,
        jobs: JobRegistry,
        counters: Counters,
        hello_within_s: float = FIRST_WITHIN_S,
        peers: Peers | None = None,
        *,
        is_insecure: bool = False,
        place: Callable[[], tuple[StoreStatus, int]] = lambda: (StoreStatus(), 0),
    ) -> None:
        """Create the service.

        Args:
            jobs: Registry of the jobs.
            counters: Counts refused joins.
            hello_within_s: Time limit in seconds for the first message of a session.
            peers: Limits per client address.
            is_insecure: Whether other hosts can connect without TLS. Part of the status.
            place: Returns the store's state and the HTTP port, which are part of the status.
        """
        self._is_insecure = is_insecure
        self._place = place
        self._jobs = jobs
        self._peers = peers or Peers()
        self._hello_within_s = hello_within_s
        self._counters = counters
        self._started_at = time.monotonic()
        self._statuses = Snapshots[tuple[str, bool], bytes]()

    def services(self, more: Mapping[str, Entry] | None = None) -> Mapping[str, Mapping[str, Entry]]:
        """Return the RPC handlers by service and method. `more` is added to all services except torchft's."""
        documented: dict[str, Entry] = {
            "Quorum": Method(lighthouse_pb2.LighthouseQuorumRequest, self.quorum),
            "Heartbeat": Method(lighthouse_pb2.LighthouseHeartbeatRequest, self.heartbeat),
            "Status": Method(lighthouse_pb2.LighthouseStatusRequest, self.status_rpc),
            "Kill": Method(lighthouse_pb2.LighthouseKillRequest, self.kill),
            "Drain": Method(lighthouse_pb2.LighthouseDrainRequest, self.drain),
            "Session": Stream(SESSION_REQUESTS, self.session, self._limit_progress),
            **(more or {}),
        }
        torchft: dict[str, Entry] = {
            "Quorum": Method(torchft_pb2.LighthouseQuorumRequest, self.torchft_quorum),
            "Heartbeat": Method(torchft_pb2.LighthouseHeartbeatRequest, self.heartbeat),
        }
        return {
            "lighthouse.v1.LighthouseService": documented,
            "LighthouseService": documented,
            "torchft.LighthouseService": torchft,
        }

    async def quorum(self, request: lighthouse_pb2.LighthouseQuorumRequest, call: Call) -> bytes:
        return NATIVE.to_bytes(await self._join(lambda: wire.participant_from_native(_requester(request)), call))

    async def torchft_quorum(self, request: torchft_pb2.LighthouseQuorumRequest, call: Call) -> bytes:
        return TORCHFT.to_bytes(await self._join(lambda: wire.participant_from_torchft(_requester(request)), call))

    async def heartbeat(
        self,
        request: lighthouse_pb2.LighthouseHeartbeatRequest | torchft_pb2.LighthouseHeartbeatRequest,
        call: Call,
    ) -> bytes:
        is_native = isinstance(request, lighthouse_pb2.LighthouseHeartbeatRequest)
        name, incarnation = read_identity(request.replica_id, request.incarnation if is_native else "")
        self._jobs.get_reported(job_of(call, replica_id=name)).receive_heartbeat_call(name, incarnation)
        return b""  # the response has no fields

    async def status_rpc(self, request: lighthouse_pb2.LighthouseStatusRequest, call: Call) -> bytes:
        def write() -> bytes:
            status = self.status(request.job, has_ranks=request.ranks)
            return LIGHTHOUSE_STATUS.write(status).SerializeToString()

        async with self._peers.expensive_read(call.peer):
            answer = self._statuses.get((request.job, request.ranks), write)
        # A reused answer is old, and `doctor` would blame the clock. Protobuf reads a field's last value.
        return answer + lighthouse_pb2.LighthouseStatusResponse(now_unix_s=time.time()).SerializeToString()

    async def kill(
        self, request: lighthouse_pb2.LighthouseKillRequest, call: Call
    ) -> lighthouse_pb2.LighthouseKillResponse:
        driver, member, reason = self._control(request, call)
        told = event("kill_asked", job=driver.job, replica_group=member.replica_id, peer=call.caller, reason=reason)
        log.warning("%s kills %s: %s", call.caller, member.replica_id, reason or "no reason given", extra=told)
        driver.add_timeline_entry(TimelineKind.KILLED, (member.replica_id,), reason)
        why = f"by {call.caller}" + (f": {reason}" if reason else "")
        if not driver.send_to_member(member, KillRequest(reason or f"killed {why}")):
            if member.participant is None or not member.participant.address:
                raise WrongState(f"address: {member.replica_id} advertises no manager address, so it cannot be killed")
            await self._kill(member.participant.address, reason or f"killed {why}", call.time_left_s or 10.0)
        driver.record_kill(member, why)
        return lighthouse_pb2.LighthouseKillResponse()

    async def drain(
        self, request: lighthouse_pb2.LighthouseDrainRequest, call: Call
    ) -> lighthouse_pb2.LighthouseDrainResponse:
        driver, member, reason = self._control(request, call)
        told = event("drain_asked", job=driver.job, replica_group=member.replica_id, peer=call.caller, reason=reason)
        log.info("%s drains %s: %s", call.caller, member.replica_id, reason or "no reason given", extra=told)
        if not driver.send_to_member(member, DrainRequest(reason or f"drained by {call.caller}")):
            raise WrongState(
                f"replica_id: {member.replica_id} holds no session, so it cannot be asked; kill it instead"
            )
        return lighthouse_pb2.LighthouseDrainResponse()

    def _control(
        self, request: lighthouse_pb2.LighthouseKillRequest | lighthouse_pb2.LighthouseDrainRequest, call: Call
    ) -> tuple[JobDriver, Group, str]:
        """Return the job's driver, the replica group and the reason (as one line) of a kill or drain request.

        Raises:
            LighthouseError: If the caller lacks permission, or the group is unknown.
        """
        check_name(request.replica_id)
        driver = self._jobs.find_job(job_of(call, request.job, request.replica_id))
        return driver, live_member(driver, request.replica_id), cut_reason(request.msg)

    async def session(self, requests: Requests[ToLighthouse], call: Call, sender: Sender) -> None:
        """Serve a manager's session until the stream closes."""
        hello = await requests.read_hello(Hello, self._hello_within_s)
        if hello is None:
            return
        driver = self._enter(hello.participant.replica_id, call)  # not earlier: a job without calls is dropped
        number = driver.open_session(hello, StreamPeer(sender, TO_MANAGERS))
        try:
            async for message in requests:
                if message is not None:
                    driver.receive_from_manager(number, message)
        finally:
            driver.end_session(number)

    def status(self, job: str = "", *, has_ranks: bool = False) -> LighthouseStatus:
        self._jobs.forget_quiet()
        ended = self._jobs.ended_jobs(job)
        drivers = list(self._jobs) if not job else [] if ended else [self._jobs.find_job(job)]
        uptime_s = time.monotonic() - self._started_at
        status = (*(driver.status(has_ranks=has_ranks) for driver in drivers), *ended)
        runs = self._jobs.runs.live_status(job)
        return LighthouseStatus(VERSION, uptime_s, status, runs, self._is_insecure, time.time(), *self._place())

    async def _join(self, read: Callable[[], Participant], call: Call) -> Quorum:
        try:
            participant, time_left_s = read(), call.require_deadline()
            driver = self._enter(participant.replica_id, call)
        except LighthouseError as e:  # counted here, because the job's driver does not see these refusals
            self._counters.refused(e)
            raise
        reply: FutureReply[Answer] = FutureReply()
        number = driver.request_quorum(participant, time_left_s, reply)
        try:
            return (await reply.value).quorum
        finally:
            driver.cancel_request(number)

    def _limit_progress(self, request: lighthouse_pb2.SessionRequest, call: Call) -> None:
        """Remove the ranks' progress from a heartbeat if the client's address exceeds its limit.

        Progress is used only for display and stall detection.
        """
        ranks = len(request.heartbeat.progress.ranks)
        if ranks and not self._peers.try_charge(call.peer, Resource.RANKS_SHOWN, ranks):
            request.heartbeat.ClearField("progress")

    def _enter(self, replica_id: str, call: Call) -> JobDriver:
        """Return the driver of the job that a group joins.

        Count the job and the replica_id, if they are new, against the limits of the client's address.
        """
        job = job_of(call, replica_id=replica_id)
        driver = self._jobs.peek(job)
        if driver is None:
            self._peers.charge(call.peer, Resource.JOBS)
        if driver is None or driver.find_member(replica_id) is None:
            self._peers.charge(call.peer, Resource.REPLICA_IDS)
        return self._jobs.get_job(job)

    async def _kill(self, address: str, msg: str, time_left_s: float) -> None:
        """Kill a replica group that has no session, by calling its manager at `address`.

        If the manager disconnects during the call, the group counts as killed.
        """
        timeout_s = max(0.1, time_left_s / 3)
        async with AsyncManagerClient(address) as manager:
            await manager.connect(timeout_s)
            try:
                await manager.kill(msg, timeout_s=timeout_s)
            except NotServed:
                with suppress(Unreachable):
                    await manager.torchft_kill(msg, timeout_s=timeout_s)
            except Unreachable:
                return


def _requester(request: Any) -> Any:
    if not request.HasField("requester"):
        raise InvalidRequest("is missing; name the replica group that joins", field="requester")
    return request.requester
