"""A lighthouse's runs, as far as a client can tell: it echoes what it hears, and where from."""

from collections.abc import Mapping

from lighthouse_protocol.limits import JOB_METADATA_KEY, RUN_METADATA_KEY
from lighthouse_protocol.messages.run import (
    FromRunRank,
    Key,
    KeyKind,
    Keys,
    RunCompleted,
    RunCounters,
    RunStopped,
    RunTerms,
)
from lighthouse_protocol.messages.run import RankHello as RankEntry
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.messages.supervisor import FromSupervisor, SupervisorHello, SupervisorWelcome
from lighthouse_protocol.pb.extensions import run_pb2 as pb
from lighthouse_protocol.refusals import Superseded, WrongState
from lighthouse_protocol.wire.codecs import KEYS, RUN_STATUS
from lighthouse_protocol.wire.streams import RANK_REQUESTS, RANK_RESPONSES, SUPERVISOR_REQUESTS, SUPERVISOR_RESPONSES
from lighthouse_runtime.server.grpc_server import GrpcServer
from lighthouse_runtime.server.rpc_handler import Call, Entry, Method, Stream
from lighthouse_runtime.server.streams import Requests, Sender

RUN = RunStatus("j", "r", "stands", RunCounters(3), RunTerms(8), (0,), False, None, (), (), ())


class RunServer:
    """An entry is answered by a Stop that names the caller's run; whatever else is said, by Done, and the end."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.server = GrpcServer({"lighthouse.v1.LighthouseService": self._methods()}, [])

    def _methods(self) -> Mapping[str, Entry]:
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
        async for message in requests:
            self.heard.append(message)
            sender.send(pb.RankResponse())  # of a kind that only a newer lighthouse knows
            if isinstance(message, RankEntry):
                sender.send(RANK_RESPONSES.write(RunStopped(_named(call), "", 0)))
            else:
                sender.send(RANK_RESPONSES.write(RunCompleted(0)))
                raise Superseded("the end")

    async def supervise(self, requests: Requests[FromSupervisor], call: Call, sender: Sender) -> None:
        async for message in requests:
            self.heard.append(message)
            if isinstance(message, SupervisorHello):
                sender.send(SUPERVISOR_RESPONSES.write(SupervisorWelcome(2.5)))
                sender.send(SUPERVISOR_RESPONSES.write(RunStopped(_named(call), "", 0)))
            else:
                return

    async def put_key(self, request: pb.PutKeyRequest, _: Call) -> pb.PutKeyResponse:
        if request.generation != 3:
            raise WrongState("generation: fenced")
        self.heard.append((request.kind, request.name, request.value))
        return pb.PutKeyResponse()

    async def get_keys(self, request: pb.GetKeysRequest, _: Call) -> pb.GetKeysResponse:
        self.heard.append((request.HasField("generation"), request.kind, request.name))
        return KEYS.write(Keys(3, (Key(KeyKind.ITERATION, "a", b"1"),)))

    async def runs(self, request: pb.RunsRequest, _: Call) -> pb.RunsResponse:
        return pb.RunsResponse(runs=[] if request.run else [RUN_STATUS.write(RUN)])

    async def stop_run(self, request: pb.StopRunRequest, call: Call) -> pb.StopRunResponse:
        self.heard.append(("stop", _named(call), request.reason))
        return pb.StopRunResponse()

    async def resume_run(self, _: pb.ResumeRunRequest, call: Call) -> pb.ResumeRunResponse:
        self.heard.append(("resume", _named(call)))
        return pb.ResumeRunResponse()


def _named(call: Call) -> str:
    return f"{call.metadata.get(JOB_METADATA_KEY)}/{call.metadata.get(RUN_METADATA_KEY)}"
