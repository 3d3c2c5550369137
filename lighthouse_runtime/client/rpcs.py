"""Every RPC of ours, once: its path, how its request is built and what its answer means. No I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.membership import Assignment, CatchUp, Distrust, Participant, Quorum, Vote
from lighthouse_protocol.messages.run import KeyKind
from lighthouse_protocol.messages.run_status import RunStatus
from lighthouse_protocol.messages.status import LighthouseStatus, ManagerStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import incident_pb2, run_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.codecs import (
    GATHERED,
    INCIDENT,
    INCIDENT_SUMMARY,
    KEYS,
    LIGHTHOUSE_STATUS,
    MANAGER_STATUS,
    RUN_STATUS,
)

T = TypeVar("T")

LIGHTHOUSE = "/lighthouse.v1.LighthouseService/"
MANAGER = "/manager.v1.ManagerService/"
SESSION = LIGHTHOUSE + "Session"
RANK = LIGHTHOUSE + "Rank"
SUPERVISE = LIGHTHOUSE + "Supervise"
WATCH = MANAGER + "Watch"
NODE = MANAGER + "Node"


@dataclass(frozen=True, slots=True)
class Rpc(Generic[T]):
    path: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]


def _nothing(_: Message) -> None:
    return None


def health() -> Rpc[None]:
    """gRPC's own question."""
    return Rpc("/grpc.health.v1.Health/Check", HealthCheckRequest(), HealthCheckResponse, _nothing)


def join(participant: Participant) -> Rpc[Quorum]:
    request = lighthouse_pb2.LighthouseQuorumRequest(requester=documented.participant_to_native(participant))
    return Rpc(
        LIGHTHOUSE + "Quorum",
        request,
        lighthouse_pb2.LighthouseQuorumResponse,
        lambda answer: documented.quorum_from_native(answer.quorum),
    )


def heartbeat(replica_id: str, incarnation: str) -> Rpc[None]:
    request = lighthouse_pb2.LighthouseHeartbeatRequest(replica_id=replica_id, incarnation=incarnation)
    return Rpc(LIGHTHOUSE + "Heartbeat", request, lighthouse_pb2.LighthouseHeartbeatResponse, _nothing)


def lighthouse_status(job: str, *, ranks: bool = False) -> Rpc[LighthouseStatus]:
    request = lighthouse_pb2.LighthouseStatusRequest(job=job, ranks=ranks)
    return Rpc(LIGHTHOUSE + "Status", request, lighthouse_pb2.LighthouseStatusResponse, LIGHTHOUSE_STATUS.read)


def lighthouse_kill(job: str, replica_id: str, msg: str) -> Rpc[None]:
    request = lighthouse_pb2.LighthouseKillRequest(job=job, replica_id=replica_id, msg=msg)
    return Rpc(LIGHTHOUSE + "Kill", request, lighthouse_pb2.LighthouseKillResponse, _nothing)


def lighthouse_drain(job: str, replica_id: str, msg: str) -> Rpc[None]:
    request = lighthouse_pb2.LighthouseDrainRequest(job=job, replica_id=replica_id, msg=msg)
    return Rpc(LIGHTHOUSE + "Drain", request, lighthouse_pb2.LighthouseDrainResponse, _nothing)


def put_key(generation: int, kind: KeyKind, name: str, value: bytes) -> Rpc[None]:
    request = run_pb2.PutKeyRequest(generation=generation, kind=kind, name=name, value=value)
    return Rpc(LIGHTHOUSE + "PutKey", request, run_pb2.PutKeyResponse, _nothing)


def get_keys(
    generation: int | None, kind: KeyKind | Literal[""], name: str
) -> Rpc[tuple[int, dict[tuple[KeyKind, str], bytes]]]:
    request = run_pb2.GetKeysRequest(generation=generation, kind=kind, name=name)

    def read(response: run_pb2.GetKeysResponse) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
        generation, keys = KEYS.read(response)
        return generation, {(key.kind, key.name): key.value for key in keys}

    return Rpc(LIGHTHOUSE + "GetKeys", request, run_pb2.GetKeysResponse, read)


def runs(run: str) -> Rpc[tuple[RunStatus, ...]]:
    request = run_pb2.RunsRequest(run=run)

    def read(response: run_pb2.RunsResponse) -> tuple[RunStatus, ...]:
        return tuple(map(RUN_STATUS.read, response.runs))

    return Rpc(LIGHTHOUSE + "Runs", request, run_pb2.RunsResponse, read)


def stop_run(reason: str) -> Rpc[None]:
    request = run_pb2.StopRunRequest(reason=reason)
    return Rpc(LIGHTHOUSE + "StopRun", request, run_pb2.StopRunResponse, _nothing)


def resume_run() -> Rpc[None]:
    return Rpc(LIGHTHOUSE + "ResumeRun", run_pb2.ResumeRunRequest(), run_pb2.ResumeRunResponse, _nothing)


def incidents(job: str) -> Rpc[tuple[IncidentSummary, ...]]:
    request = incident_pb2.IncidentsRequest(job=job)

    def read(response: incident_pb2.IncidentsResponse) -> tuple[IncidentSummary, ...]:
        return tuple(map(INCIDENT_SUMMARY.read, response.incidents))

    return Rpc(LIGHTHOUSE + "Incidents", request, incident_pb2.IncidentsResponse, read)


def incident(id: str) -> Rpc[Incident]:
    request = incident_pb2.IncidentRequest(id=id)

    def read(response: incident_pb2.IncidentResponse) -> Incident:
        return INCIDENT.read(response.incident)

    return Rpc(LIGHTHOUSE + "Incident", request, incident_pb2.IncidentResponse, read)


def stacks(job: str, ranks: Sequence[str]) -> Rpc[Gathered]:
    request = incident_pb2.StacksRequest(job=job, ranks=ranks)
    return Rpc(LIGHTHOUSE + "Stacks", request, incident_pb2.StacksResponse, GATHERED.read)


def quorum(
    group_rank: int,
    step: int,
    checkpoint_address: str,
    *,
    tag_quorum_id: int | None,
    shrink_only: bool,
    init_sync: bool,
    commit_failures: int,
    worker: str,
    catch_up: CatchUp,
    compares: bool,
    distrust: Distrust | None,
    heals_first: bool | None,
) -> Rpc[Assignment]:
    held = catch_up.held
    request = manager_pb2.ManagerQuorumRequest(
        rank=group_rank,
        step=step,
        checkpoint_server_addr=checkpoint_address,
        tag_quorum_id=tag_quorum_id,
        shrink_only=shrink_only,
        init_sync=init_sync,
        commit_failures=commit_failures,
        worker=worker,
        catch_up=catch_up.is_wanted,
        held_step=held.step if held else None,
        held_quorum_id=held.quorum_id if held else None,
        has_source=catch_up.has_source,
        compares=compares,
        distrust=documented.distrust_to_native(distrust),
        heals_first=heals_first,
    )
    return Rpc(MANAGER + "Quorum", request, manager_pb2.ManagerQuorumResponse, documented.assignment_from_native)


def checkpoint_address(group_rank: int, step: int | None) -> Rpc[str]:
    request = manager_pb2.CheckpointAddressRequest(rank=group_rank, step=step)
    return Rpc(
        MANAGER + "CheckpointAddress",
        request,
        manager_pb2.CheckpointAddressResponse,
        lambda answer: str(answer.checkpoint_server_address),
    )


def vote(group_rank: int, step: int, vote: bool, quorum_id: int | None, wants_next: bool) -> Rpc[Vote]:
    request = manager_pb2.ShouldCommitRequest(
        rank=group_rank, step=step, should_commit=vote, quorum_id=quorum_id, wants_next=wants_next
    )
    return Rpc(MANAGER + "ShouldCommit", request, manager_pb2.ShouldCommitResponse, documented.vote_from_native)


def report(group_rank: int, worker: str, reason: str, ends_group: bool) -> Rpc[None]:
    request = manager_pb2.ReportRequest(rank=group_rank, worker=worker, reason=reason, ends_group=ends_group)
    return Rpc(MANAGER + "Report", request, manager_pb2.ReportResponse, _nothing)


def manager_kill(msg: str) -> Rpc[None]:
    return Rpc(MANAGER + "Kill", manager_pb2.KillRequest(msg=msg), manager_pb2.KillResponse, _nothing)


def torchft_manager_kill(msg: str) -> Rpc[None]:
    """For a member that is torchft's own manager."""
    return Rpc("/torchft.ManagerService/Kill", torchft_pb2.KillRequest(msg=msg), torchft_pb2.KillResponse, _nothing)


def manager_status() -> Rpc[ManagerStatus]:
    return Rpc(
        MANAGER + "Status",
        manager_pb2.ManagerStatusRequest(),
        manager_pb2.ManagerStatusResponse,
        MANAGER_STATUS.read,
    )
