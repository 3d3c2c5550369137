"""The RPCs of runs: streams of ranks and of supervisors, keys, status, stop and resume."""

from collections.abc import Mapping

from lighthouse.runs.driver import RunDriver
from lighthouse.runs.registry import RunRegistry
from lighthouse.server.lookup import job_named, job_of
from lighthouse_protocol.identity import group_of_supervisor
from lighthouse_protocol.limits import DEFAULT_RUN, RUN_METADATA_KEY, cut_reason
from lighthouse_protocol.messages.run import FromRunRank, Key, Keys, RankHello, check_kind
from lighthouse_protocol.messages.supervisor import FromSupervisor, HostExcluded, StopAsked, SupervisorHello
from lighthouse_protocol.pb.extensions import run_pb2 as pb
from lighthouse_protocol.refusals import WrongState
from lighthouse_protocol.rules.access import check_bounds_on_run
from lighthouse_protocol.rules.peer_limits import Resource
from lighthouse_protocol.wire.codecs import KEYS, RUN_STATUS
from lighthouse_protocol.wire.streams import RANK_REQUESTS, RANK_RESPONSES, SUPERVISOR_REQUESTS, SUPERVISOR_RESPONSES
from lighthouse_runtime.security.audit import Audit
from lighthouse_runtime.server.peers import Peers
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method, Stream
from lighthouse_runtime.server.stream_peer import Frames, StreamPeer
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender
from lighthouse_runtime.timing.snapshots import Snapshots

TO_RANKS = Frames(RANK_RESPONSES.write)
TO_SUPERVISORS = Frames(SUPERVISOR_RESPONSES.write)
NO_PART = "that supervisor has no part in the run; it counts for itself alone"
ALREADY = "the run is over, or the host is excluded, already"


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
        self._statuses = Snapshots(self._status)

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

    # -- streams, until they end

    async def rank(self, requests: Requests[FromRunRank], call: Call, sender: Sender) -> None:
        entry = await requests.hello(RankHello, self._entry_within_s)
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
        entry = await requests.hello(SupervisorHello, self._entry_within_s)
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
                    self._note(call, driver, entry, message, has_say=driver.has_say(session))
                driver.receive_from_supervisor(session, message)
        finally:
            driver.end_supervisor(session)

    def _note(
        self, call: Call, driver: RunDriver, entry: SupervisorHello, asked: StopAsked | HostExcluded, *, has_say: bool
    ) -> None:
        """Write what a supervisor asks for to the audit: as an act if it changes the run, else as a refusal."""
        what = type(asked).__name__
        target = f"job={driver.name[0]}, run={driver.name[1]}, by={entry.name}, reason={asked.reason}"
        if has_say and driver.is_changed_by(entry, asked):
            self._audit.act(call.principal, call.caller, what, target)
        else:
            self._audit.refuse(call.principal, call.caller, what, ALREADY if has_say else NO_PART, target)

    def _get(self, call: Call) -> RunDriver:
        """One more process of a run; it counts for the caller, and so does a run that is new here. Raises a refusal."""
        self._peers.take(call.peer, Resource.PROCESSES)
        if not self._runs.has(*_named(call)):
            self._peers.take(call.peer, Resource.RUNS)
        return self._runs.get(*_named(call))

    # -- keys

    async def put_key(self, request: pb.PutKeyRequest, call: Call) -> pb.PutKeyResponse:
        self._peers.take(call.peer, Resource.DURABLE_WRITES)
        driver = self._runs.find(*_named(call))
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
        async with self._peers.read(call.peer):
            return self._keys(request, call).SerializeToString()

    def _keys(self, request: pb.GetKeysRequest, call: Call) -> pb.GetKeysResponse:
        kind = check_kind(request.kind) if request.kind else None
        keys = self._runs.find(*_named(call)).machine.keys
        fence = request.generation if request.HasField("generation") else None
        if request.previous:
            values = keys.previous(fence)
        else:
            values = keys.of(request.of, fence) if request.HasField("of") else keys.present(fence)
        found = (Key(*key, value) for key, value in values.items())
        wanted = (key for key in found if kind in (None, key.kind) and request.name in ("", key.name))
        return KEYS.write(Keys(keys.number, tuple(wanted)))

    # -- status and control

    async def runs(self, request: pb.RunsRequest, call: Call) -> bytes:
        async with self._peers.read(call.peer):
            return self._statuses.of((job_named(call), request.run))

    def _status(self, asked: tuple[str, str]) -> bytes:
        return pb.RunsResponse(runs=map(RUN_STATUS.write, self._runs.status(*asked))).SerializeToString()

    async def stop_run(self, request: pb.StopRunRequest, call: Call) -> pb.StopRunResponse:
        check_bounds_on_run(call.principal, job_named(call), "StopRun")
        driver = self._runs.find(*_named(call))
        if driver.machine.completed is not None:
            raise WrongState(f"run: {driver.name[1]} is completed; there is nothing to stop")
        driver.stop(cut_reason(request.reason) or "stopping", f"operator at {call.caller}")
        return pb.StopRunResponse()

    async def resume_run(self, _: pb.ResumeRunRequest, call: Call) -> pb.ResumeRunResponse:
        check_bounds_on_run(call.principal, job_named(call), "ResumeRun")
        self._runs.find(*_named(call)).resume()
        return pb.ResumeRunResponse()


def _named(call: Call) -> tuple[str, str]:
    """Raises NotPermitted, as job_of()."""
    return job_of(call), call.metadata.get(RUN_METADATA_KEY) or DEFAULT_RUN


def _group_of(entry: SupervisorHello, call: Call) -> str:
    """Whose supervisor that is; of two groups that its name may mean, the one that the caller is bound to."""
    group = group_of_supervisor(entry.name)
    return group if group == call.principal.replica_id else entry.name
