"""The RPCs of runs: streams of ranks and of supervisors, keys, status, stop and resume."""

from collections.abc import Mapping

from lighthouse.runs.registry import RunRegistry
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, JOB_METADATA_KEY, RUN_METADATA_KEY, cut_reason
from lighthouse_protocol.messages.run import FromRunRank, Key, Keys, RankHello, check_kind
from lighthouse_protocol.messages.supervisor import FromSupervisor, SupervisorHello
from lighthouse_protocol.pb.extensions import run_pb2 as pb
from lighthouse_protocol.refusals import WrongState
from lighthouse_protocol.wire.codecs import KEYS, RUN_STATUS
from lighthouse_protocol.wire.streams import RANK_REQUESTS, RANK_RESPONSES, SUPERVISOR_REQUESTS, SUPERVISOR_RESPONSES
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method, Stream
from lighthouse_runtime.server.stream_peer import Frames, StreamPeer
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender

TO_RANKS = Frames(RANK_RESPONSES.write)
TO_SUPERVISORS = Frames(SUPERVISOR_RESPONSES.write)


class RunService:
    def __init__(self, runs: RunRegistry, policy: ControlPolicy, entry_within_s: float = FIRST_WITHIN_S) -> None:
        self._runs = runs
        self._policy = policy
        self._entry_within_s = entry_within_s

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
        driver = self._runs.get(*_named(call))
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
        driver = self._runs.get(*_named(call))
        session = driver.open_supervisor(entry, StreamPeer(sender, TO_SUPERVISORS))
        try:
            async for message in requests:
                if message is not None:
                    driver.receive_from_supervisor(session, message)
        finally:
            driver.end_supervisor(session)

    # -- keys

    async def put_key(self, request: pb.PutKeyRequest, call: Call) -> pb.PutKeyResponse:
        driver = self._runs.find(*_named(call))
        driver.put_key(request.generation, check_kind(request.kind), request.name, request.value)
        return pb.PutKeyResponse()

    async def get_keys(self, request: pb.GetKeysRequest, call: Call) -> pb.GetKeysResponse:
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

    async def runs(self, request: pb.RunsRequest, call: Call) -> pb.RunsResponse:
        return pb.RunsResponse(runs=map(RUN_STATUS.write, self._runs.status(_named(call)[0], request.run)))

    async def stop_run(self, request: pb.StopRunRequest, call: Call) -> pb.StopRunResponse:
        self._policy.check(call)
        driver = self._runs.find(*_named(call))
        if driver.machine.completed is not None:
            raise WrongState(f"run: {driver.name[1]} is completed; there is nothing to stop")
        driver.stop(cut_reason(request.reason) or "asked to stop", f"operator at {call.peer}")
        return pb.StopRunResponse()

    async def resume_run(self, _: pb.ResumeRunRequest, call: Call) -> pb.ResumeRunResponse:
        self._policy.check(call)
        self._runs.find(*_named(call)).resume()
        return pb.ResumeRunResponse()


def _named(call: Call) -> tuple[str, str]:
    return call.metadata.get(JOB_METADATA_KEY) or DEFAULT_JOB, call.metadata.get(RUN_METADATA_KEY) or DEFAULT_RUN
