"""Descriptions of all RPCs: path, request, answer and timeout. No I/O.

connection.py turns each function into a client method with the same parameters, which its docstring describes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from lighthouse_protocol.messages.chaos import FaultKind
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentSummary
from lighthouse_protocol.messages.membership import PLAIN, Assignment, CatchUp, Decision, Distrust, Participant, Quorum
from lighthouse_protocol.messages.run import KeyKind, RunStatus
from lighthouse_protocol.messages.status import LighthouseStatus, ManagerStatus
from lighthouse_protocol.pb.documented import lighthouse_pb2, manager_pb2
from lighthouse_protocol.pb.extensions import chaos_pb2, incident_pb2, run_pb2
from lighthouse_protocol.pb.torchft import torchft_pb2
from lighthouse_protocol.rules.access import ADDRESS_WORD, prove
from lighthouse_protocol.wire import codec as codecs
from lighthouse_protocol.wire import documented

T = TypeVar("T")

LIGHTHOUSE = "/lighthouse.v1.LighthouseService/"
MANAGER = "/manager.v1.ManagerService/"


@dataclass(frozen=True, slots=True)
class Rpc(Generic[T]):
    """Description of a call. If the server is down, the call fails at once, or waits if `wait_for_ready` is set."""

    path: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]
    timeout_s: float = 5.0
    wait_for_ready: bool = False


def _nothing(_: Message) -> None:
    return None


def health(*, timeout_s: float) -> Rpc[None]:
    """Call gRPC's health check, and return as soon as the server answers. The reported health is ignored."""
    path = "/grpc.health.v1.Health/Check"
    return Rpc(path, HealthCheckRequest(), HealthCheckResponse, _nothing, timeout_s, wait_for_ready=True)


def is_serving(*, timeout_s: float) -> Rpc[bool]:
    """Return whether the server accepts calls. A lighthouse that is a follower does not."""
    path = "/grpc.health.v1.Health/Check"
    serving = HealthCheckResponse.ServingStatus.SERVING
    return Rpc(path, HealthCheckRequest(), HealthCheckResponse, lambda answer: answer.status == serving, timeout_s)


def join(participant: Participant, *, timeout_s: float, wait_for_ready: bool = True) -> Rpc[Quorum]:
    """Join the next quorum, wait until it has formed, and return it."""
    return Rpc(
        LIGHTHOUSE + "Quorum",
        lighthouse_pb2.LighthouseQuorumRequest(requester=documented.participant_to_native(participant)),
        lighthouse_pb2.LighthouseQuorumResponse,
        lambda answer: documented.quorum_from_native(answer.quorum),
        timeout_s,
        wait_for_ready,
    )


def heartbeat(replica_id: str, incarnation: str = "", *, timeout_s: float = 5.0) -> Rpc[None]:
    request = lighthouse_pb2.LighthouseHeartbeatRequest(replica_id=replica_id, incarnation=incarnation)
    return Rpc(LIGHTHOUSE + "Heartbeat", request, lighthouse_pb2.LighthouseHeartbeatResponse, _nothing, timeout_s)


def lighthouse_status(job: str = "", *, ranks: bool = False, timeout_s: float = 5.0) -> Rpc[LighthouseStatus]:
    """Return the status of `job`, or of all jobs if it is empty. With `ranks`, include the progress of every rank."""
    return Rpc(
        LIGHTHOUSE + "Status",
        lighthouse_pb2.LighthouseStatusRequest(job=job, ranks=ranks),
        lighthouse_pb2.LighthouseStatusResponse,
        codecs.LIGHTHOUSE_STATUS.read,
        timeout_s,
    )


def lighthouse_kill(replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> Rpc[None]:
    """Kill a replica group. The lighthouse sends the order, with the reason `msg`, to the group's manager."""
    request = lighthouse_pb2.LighthouseKillRequest(replica_id=replica_id, msg=msg)
    return Rpc(LIGHTHOUSE + "Kill", request, lighthouse_pb2.LighthouseKillResponse, _nothing, timeout_s)


def lighthouse_drain(replica_id: str, msg: str = "", *, timeout_s: float = 10.0) -> Rpc[None]:
    """Ask a replica group to leave the job. `msg` is the reason.

    The group first completes the step in which the other groups expect it.
    """
    request = lighthouse_pb2.LighthouseDrainRequest(replica_id=replica_id, msg=msg)
    return Rpc(LIGHTHOUSE + "Drain", request, lighthouse_pb2.LighthouseDrainResponse, _nothing, timeout_s)


def put_key(
    generation: int, kind: KeyKind, name: str, value: bytes, *, slot: int, secret: str, timeout_s: float = 5.0
) -> Rpc[None]:
    """Store a key in the run's current generation.

    Args:
        generation: Generation of the caller.
        kind: Kind of the key.
        name: Name of the key, unique among the keys of the same kind.
        value: Value of the key.
        slot: Slot in the caller's RankHello.
        secret: Secret in the caller's RankHello.
        timeout_s: Timeout in seconds.

    Raises:
        WrongState: `generation` is not the current one.
        NotPermitted: The caller is not a rank of the run.
    """
    request = run_pb2.PutKeyRequest(generation=generation, kind=kind, name=name, value=value, slot=slot, secret=secret)
    return Rpc(LIGHTHOUSE + "PutKey", request, run_pb2.PutKeyResponse, _nothing, timeout_s, wait_for_ready=True)


def get_keys(
    generation: int | None = None,
    kind: KeyKind | Literal[""] = "",
    name: str = "",
    *,
    of: int | None = None,
    previous: bool = False,
    timeout_s: float = 5.0,
) -> Rpc[tuple[int, dict[tuple[KeyKind, str], bytes]]]:
    """Return the run's current generation and its keys.

    Args:
        generation: Generation that the caller expects to be the current one, or None.
        kind: Kind of the keys, or empty for all.
        name: Name of the key, or empty for all.
        of: Return the keys of this generation instead of the current one's.
        previous: Return each key's value in the newest earlier generation that set it.
        timeout_s: Timeout in seconds.

    Raises:
        WrongState: `generation` is not the current one.
        UnknownName: The keys of generation `of` have been deleted.
    """

    def read(answer: run_pb2.GetKeysResponse) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
        current, keys = codecs.KEYS.read(answer)
        return current, {(key.kind, key.name): key.value for key in keys}

    return Rpc(
        LIGHTHOUSE + "GetKeys",
        run_pb2.GetKeysRequest(generation=generation, kind=kind, name=name, of=of, previous=previous),
        run_pb2.GetKeysResponse,
        read,
        timeout_s,
        wait_for_ready=True,
    )


def runs(run: str = "", *, timeout_s: float = 5.0) -> Rpc[tuple[RunStatus, ...]]:
    """Return the status of `run`, or of all runs of the client's job if `run` is empty."""
    return Rpc(
        LIGHTHOUSE + "Runs",
        run_pb2.RunsRequest(run=run),
        run_pb2.RunsResponse,
        lambda answer: tuple(map(codecs.RUN_STATUS.read, answer.runs)),
        timeout_s,
    )


def stop_run(reason: str, *, timeout_s: float = 10.0) -> Rpc[None]:
    """Stop the run on all hosts. It stays stopped until resume_run()."""
    request = run_pb2.StopRunRequest(reason=reason)
    return Rpc(LIGHTHOUSE + "StopRun", request, run_pb2.StopRunResponse, _nothing, timeout_s)


def resume_run(*, timeout_s: float = 10.0) -> Rpc[None]:
    """Resume a stopped run and readmit excluded hosts."""
    request = run_pb2.ResumeRunRequest()
    return Rpc(LIGHTHOUSE + "ResumeRun", request, run_pb2.ResumeRunResponse, _nothing, timeout_s)


def incidents(job: str = "", *, timeout_s: float = 5.0) -> Rpc[tuple[IncidentSummary, ...]]:
    """Return the incidents of `job`, or of all jobs if it is empty, newest first and without their evidence."""
    return Rpc(
        LIGHTHOUSE + "Incidents",
        incident_pb2.IncidentsRequest(job=job),
        incident_pb2.IncidentsResponse,
        lambda answer: tuple(map(codecs.INCIDENT_SUMMARY.read, answer.incidents)),
        timeout_s,
    )


def incident(id: str, *, timeout_s: float = 10.0) -> Rpc[Incident]:
    """Return an incident with its evidence."""
    return Rpc(
        LIGHTHOUSE + "Incident",
        incident_pb2.IncidentRequest(id=id),
        incident_pb2.IncidentResponse,
        lambda answer: codecs.INCIDENT.read(answer.incident),
        timeout_s,
    )


def ledger(page: str = "", job: str = "", *, timeout_s: float = 5.0) -> Rpc[tuple[tuple[str, ...], str]]:
    """Return the ledger's lines on the page named `page`, and the name of the next page.

    `page` is a name from an earlier call, the first day to read (such as 20261129), or empty for the oldest page. The
    name that follows the last page is empty. With `job`, only the lines of that job are returned.
    """
    return Rpc(
        LIGHTHOUSE + "Ledger",
        incident_pb2.LedgerRequest(job=job, page=page),
        incident_pb2.LedgerResponse,
        lambda answer: (tuple(answer.lines), answer.next),
        timeout_s,
    )


def stacks(ranks: Sequence[str] = (), *, timeout_s: float = 15.0) -> Rpc[Gathered]:
    """Collect evidence, such as stack traces, from the given ranks (such as "b/1") and replica groups (such as "b").

    If `ranks` is empty, collect from all ranks in the quorum.
    """
    request = incident_pb2.StacksRequest(ranks=ranks)
    return Rpc(LIGHTHOUSE + "Stacks", request, incident_pb2.StacksResponse, codecs.GATHERED.read, timeout_s)


def inject(
    replica_id: str,
    kind: FaultKind,
    group_rank: int | None = None,
    *,
    seconds: float = 0.0,
    delay_s: float = 0.0,
    timeout_s: float = 90.0,
) -> Rpc[str]:
    """Inject a fault into a rank or a replica group, wait until it has ended, and return the id of its incident.

    Without `group_rank`, the fault affects the whole group or its manager. `seconds` is the duration, for kinds of
    faults that have one, and `delay_s` the delay of each message if `kind` is SLOW. Cancelling the call ends the fault.
    """
    request = chaos_pb2.InjectRequest(
        replica_id=replica_id, group_rank=group_rank, kind=kind, seconds=seconds, delay_s=delay_s
    )
    return Rpc(LIGHTHOUSE + "Inject", request, chaos_pb2.InjectResponse, lambda answer: str(answer.incident), timeout_s)


def quorum(
    group_rank: int,
    step: int,
    checkpoint_address: str = "",
    *,
    timeout_s: float,
    tag_quorum_id: int | None = None,
    shrink_only: bool = False,
    init_sync: bool = True,
    commit_failures: int = 0,
    rank_incarnation: str = "",
    catch_up: CatchUp = PLAIN,
    compares: bool = False,
    distrust: Distrust | None = None,
    heals_first: bool | None = None,
    wait_for_ready: bool = True,
) -> Rpc[Assignment]:
    """Request a quorum for one rank. Wait until all ranks of the group have requested it and the quorum has formed.

    `checkpoint_address` is where the rank serves its state to healing groups. `tag_quorum_id` is the quorum under which
    that state was committed. `shrink_only` admits no group that was outside the last quorum. With `init_sync`, all
    groups copy the same state at step 0. `commit_failures` counts consecutive discarded steps. `rank_incarnation`
    identifies the rank's process and changes at every start. The fields of Participant describe the other arguments.
    """
    held = catch_up.held
    request = manager_pb2.ManagerQuorumRequest(
        rank=group_rank,
        step=step,
        checkpoint_server_addr=checkpoint_address,
        tag_quorum_id=tag_quorum_id,
        shrink_only=shrink_only,
        init_sync=init_sync,
        commit_failures=commit_failures,
        rank_incarnation=rank_incarnation,
        catch_up=catch_up.is_wanted,
        held_step=held.step if held else None,
        held_quorum_id=held.quorum_id if held else None,
        has_source=catch_up.has_source,
        compares=compares,
        distrust=documented.distrust_to_native(distrust),
        heals_first=heals_first,
    )
    return Rpc(
        MANAGER + "Quorum",
        request,
        manager_pb2.ManagerQuorumResponse,
        documented.assignment_from_native,
        timeout_s,
        wait_for_ready,
    )


def checkpoint_address(
    group_rank: int, step: int | None = None, *, quorum_id: int = 0, secret: str = "", timeout_s: float = 10.0
) -> Rpc[str]:
    """Return the address from which a rank of this manager's group serves its state.

    Args:
        group_rank: The rank.
        step: Step of the state, or None for any step.
        quorum_id: Id of the quorum to which the caller belongs.
        secret: Secret of that quorum, which proves the caller's membership.
        timeout_s: Timeout in seconds.
    """
    proof = prove(secret, ADDRESS_WORD, quorum_id, group_rank)
    return Rpc(
        MANAGER + "CheckpointAddress",
        manager_pb2.CheckpointAddressRequest(rank=group_rank, step=step, quorum_id=quorum_id, proof=proof),
        manager_pb2.CheckpointAddressResponse,
        lambda answer: str(answer.checkpoint_server_address),
        timeout_s,
    )


def vote(
    group_rank: int,
    step: int,
    vote: bool,
    *,
    timeout_s: float,
    quorum_id: int | None = None,
    wants_next: bool = False,
    wait_for_ready: bool = True,
) -> Rpc[Decision]:
    """Vote on whether to commit a step, wait for the votes of all ranks of the group, and return the decision.

    `quorum_id` is the quorum of the step, or None for the last one that this rank received. With `wants_next`, a
    decision to commit may contain the assignment for the next step, which saves a quorum() call.
    """
    return Rpc(
        MANAGER + "ShouldCommit",
        manager_pb2.ShouldCommitRequest(
            rank=group_rank, step=step, should_commit=vote, quorum_id=quorum_id, wants_next=wants_next
        ),
        manager_pb2.ShouldCommitResponse,
        documented.vote_from_native,
        timeout_s,
        wait_for_ready,
    )


def should_commit(
    group_rank: int, step: int, vote: bool, *, timeout_s: float, quorum_id: int | None = None
) -> Rpc[bool]:
    """Vote like vote(), but return only whether the group commits the step."""
    return Rpc(
        MANAGER + "ShouldCommit",
        manager_pb2.ShouldCommitRequest(rank=group_rank, step=step, should_commit=vote, quorum_id=quorum_id),
        manager_pb2.ShouldCommitResponse,
        lambda answer: documented.vote_from_native(answer).commit,
        timeout_s,
        wait_for_ready=True,
    )


def report(
    group_rank: int,
    rank_incarnation: str,
    reason: str,
    *,
    ends_group: bool = False,
    drains: bool = False,
    timeout_s: float = 1.0,
) -> Rpc[None]:
    """Report why this rank is about to exit.

    Args:
        group_rank: The rank.
        rank_incarnation: Incarnation that the rank sent in its WatchHello.
        reason: Why the rank exits.
        ends_group: Whether the whole group exits, not only this rank.
        drains: Whether the group leaves the job after its current step, without a failure.
        timeout_s: Timeout in seconds.
    """
    request = manager_pb2.ReportRequest(
        rank=group_rank, rank_incarnation=rank_incarnation, reason=reason, ends_group=ends_group, drains=drains
    )
    return Rpc(MANAGER + "Report", request, manager_pb2.ReportResponse, _nothing, timeout_s)


def manager_kill(msg: str = "", *, timeout_s: float = 10.0) -> Rpc[None]:
    """Kill the manager's replica group and stop the manager."""
    return Rpc(MANAGER + "Kill", manager_pb2.KillRequest(msg=msg), manager_pb2.KillResponse, _nothing, timeout_s)


def torchft_manager_kill(msg: str = "", *, timeout_s: float = 10.0) -> Rpc[None]:
    """Kill a replica group whose manager is torchft's."""
    request = torchft_pb2.KillRequest(msg=msg)
    return Rpc("/torchft.ManagerService/Kill", request, torchft_pb2.KillResponse, _nothing, timeout_s)


def manager_status(*, timeout_s: float = 5.0) -> Rpc[ManagerStatus]:
    return Rpc(
        MANAGER + "Status",
        manager_pb2.ManagerStatusRequest(),
        manager_pb2.ManagerStatusResponse,
        codecs.MANAGER_STATUS.read,
        timeout_s,
    )
