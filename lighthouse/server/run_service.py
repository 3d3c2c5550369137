"""The RPCs of runs: streams of ranks and of supervisors, keys, status, stop and resume."""

from collections.abc import Mapping

from lighthouse.runs.registry import RunRegistry
from lighthouse_protocol.limits import DEFAULT_JOB, DEFAULT_RUN, JOB_METADATA_KEY, RUN_METADATA_KEY, cut_reason
from lighthouse_protocol.messages.run import RankHello as RankEntry
from lighthouse_protocol.messages.supervisor import SupervisorHello
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest, WrongState
from lighthouse_protocol.wire import generation_wire, run_status_wire, supervisor_wire
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method, Stream
from lighthouse_runtime.server.stream_peer import Frames, StreamPeer
from lighthouse_runtime.server.streams import FIRST_WITHIN_S, Requests, Sender

TO_RANKS = Frames(generation_wire.rank_response_to_wire)
TO_SUPERVISORS = Frames(supervisor_wire.supervisor_response_to_wire)


class RunService:
    def __init__(self, runs: RunRegistry, policy: ControlPolicy, entry_within_s: float = FIRST_WITHIN_S) -> None:
        self._runs = runs
        self._policy = policy
        self._entry_within_s = entry_within_s

    def methods(self) -> Mapping[str, Entry]:
        return {
            "Rank": Stream(pb.RankRequest, self.rank),
            "Supervise": Stream(pb.SupervisorRequest, self.supervise),
            "PutKey": Method(pb.PutKeyRequest, self.put_key),
            "GetKeys": Method(pb.GetKeysRequest, self.get_keys),
            "Runs": Method(pb.RunsRequest, self.runs),
            "StopRun": Method(pb.StopRunRequest, self.stop_run),
            "ResumeRun": Method(pb.ResumeRunRequest, self.resume_run),
        }

    # -- streams, until they end

    async def rank(self, requests: Requests[pb.RankRequest], call: Call, sender: Sender) -> None:
        read = generation_wire.rank_request_from_wire
        entry = await requests.first(read, "entry", self._entry_within_s)
        if entry is None:
            return
        if not isinstance(entry, RankEntry):
            raise InvalidRequest("must be the first message of a rank's stream", field="entry")
        driver = self._runs.get(*_named(call))
        session = driver.open_rank(entry, StreamPeer(sender, TO_RANKS))
        try:
            async for request in requests:
                if (message := read(request)) is not None:
                    driver.receive_from_rank(session, message)
        finally:
            driver.end_rank(session)

    async def supervise(self, requests: Requests[pb.SupervisorRequest], call: Call, sender: Sender) -> None:
        read = supervisor_wire.supervisor_request_from_wire
        entry = await requests.first(read, "entry", self._entry_within_s)
        if entry is None:
            return
        if not isinstance(entry, SupervisorHello):
            raise InvalidRequest("must be the first message of a supervisor's stream", field="entry")
        driver = self._runs.get(*_named(call))
        session = driver.open_supervisor(entry, StreamPeer(sender, TO_SUPERVISORS))
        try:
            async for request in requests:
                if (message := read(request)) is not None:
                    driver.receive_from_supervisor(session, message)
        finally:
            driver.end_supervisor(session)

    # -- keys

    async def put_key(self, request: pb.PutKeyRequest, call: Call) -> pb.PutKeyResponse:
        driver = self._runs.find(*_named(call))
        driver.put_key(request.generation, run_status_wire.check_kind(request.kind), request.name, request.value)
        return pb.PutKeyResponse()

    async def get_keys(self, request: pb.GetKeysRequest, call: Call) -> pb.GetKeysResponse:
        kind = run_status_wire.check_kind(request.kind) if request.kind else None
        keys = self._runs.find(*_named(call)).machine.keys
        present = keys.present(request.generation if request.HasField("generation") else None)
        found = {
            key: value for key, value in present.items() if kind in (None, key[0]) and request.name in ("", key[1])
        }
        return run_status_wire.keys_to_wire(keys.number, found)

    # -- status and control

    async def runs(self, request: pb.RunsRequest, call: Call) -> pb.RunsResponse:
        return run_status_wire.runs_to_wire(self._runs.status(_named(call)[0], request.run))

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
