"""To and from the messages between the supervisors of a group's hosts, with every check of a field.

Readers raise InvalidRequest that names the field. A kind of message that this version does not know is read as None and
is to be skipped.
"""

from lighthouse_protocol.constraints import check_age, check_count, check_short
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, cut_output, cut_reason
from lighthouse_protocol.messages.evidence import (
    MAX_PROCESS_BYTES,
    MAX_STACKS_BYTES,
    ProcessSnapshot,
    cut_middle,
    cut_missing,
)
from lighthouse_protocol.messages.hosts import (
    FromHost,
    GroupEnded,
    HaltRanks,
    HostCheckFailed,
    HostEndAsked,
    HostHeartbeat,
    HostHello,
    HostRankEnded,
    HostWelcome,
    ProbeRequest,
    ProbeResult,
    StartRanks,
    ToHost,
)
from lighthouse_protocol.messages.session import EvidenceOffer
from lighthouse_protocol.pb.extensions import node_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest

_STATUSES = range(-128, 256)


def node_request_to_wire(message: FromHost) -> pb.NodeRequest:
    match message:
        case HostHello(replica_id, run, node_rank, nnodes, nproc, incarnation):
            entry = pb.NodeEntry(
                replica_id=replica_id, run=run, node_rank=node_rank, nnodes=nnodes, nproc=nproc, incarnation=incarnation
            )
            return pb.NodeRequest(entry=entry)
        case HostHeartbeat():
            return pb.NodeRequest(beat=pb.NodeBeat())
        case HostRankEnded(rank, attempt, status, cause):
            ended = pb.RankEnded(rank=rank, attempt=attempt, status=status, cause=cut_reason(cause))
            return pb.NodeRequest(ended=ended)
        case HostCheckFailed(reason):
            return pb.NodeRequest(check_failed=pb.NodeCheckFailed(reason=cut_reason(reason)))
        case HostEndAsked(status):
            return pb.NodeRequest(end=pb.NodeEndAsked(status=status))
        case ProbeResult():
            return pb.NodeRequest(seen=_seen(message))


def node_request_from_wire(message: pb.NodeRequest) -> FromHost | None:
    match message.WhichOneof("message"):
        case "entry":
            return _entry(message.entry)
        case "beat":
            return HostHeartbeat()
        case "ended":
            ended = message.ended
            return HostRankEnded(_rank(ended.rank), ended.attempt, _status(ended.status), cut_reason(ended.cause))
        case "check_failed":
            return HostCheckFailed(cut_reason(message.check_failed.reason))
        case "end":
            return HostEndAsked(_status(message.end.status))
        case "seen":
            return _seen_from(message.seen)
        case _:
            return None


def node_response_to_wire(message: ToHost) -> pb.NodeResponse:
    match message:
        case HostWelcome(address, port):
            return pb.NodeResponse(welcome=pb.NodeWelcome(master_address=address, master_port=port))
        case StartRanks(ranks, attempt):
            return pb.NodeResponse(start=pb.NodeStart(ranks=ranks, attempt=attempt))
        case HaltRanks(ranks, grace_s):
            return pb.NodeResponse(halt=pb.NodeHalt(ranks=ranks, grace_s=grace_s))
        case GroupEnded(status, why, excluded):
            over = pb.NodeOver(status=status, why=cut_reason(why), excluded=cut_reason(excluded))
            return pb.NodeResponse(over=over)
        case HostHeartbeat():
            return pb.NodeResponse(beat=pb.NodeBeat())
        case ProbeRequest(number, rank, pid, host, started, EvidenceOffer(signal, descriptor)):
            look = pb.NodeLook(
                number=number, rank=rank, pid=pid, host=host, started=started, signal=signal, descriptor=descriptor
            )
            return pb.NodeResponse(look=look)


def node_response_from_wire(message: pb.NodeResponse) -> ToHost | None:
    match message.WhichOneof("message"):
        case "welcome":
            return HostWelcome(check_short(message.welcome.master_address, "master_address"), _port(message.welcome))
        case "start":
            return StartRanks(tuple(map(_rank, message.start.ranks)), message.start.attempt)
        case "halt":
            return HaltRanks(tuple(map(_rank, message.halt.ranks)), check_age(message.halt.grace_s, "grace_s"))
        case "over":
            over = message.over
            return GroupEnded(_status(over.status), cut_reason(over.why), cut_reason(over.excluded))
        case "look":
            return _look_from(message.look)
        case "beat":
            return HostHeartbeat()
        case _:
            return None


def _seen(message: ProbeResult) -> pb.NodeSeen:
    """What is too long is cut."""
    seen = message.outside
    return pb.NodeSeen(
        number=message.number,
        stacks=cut_middle(seen.stacks, MAX_STACKS_BYTES),
        process=cut_middle(seen.process, MAX_PROCESS_BYTES),
        output=cut_output(seen.output),
        missing=cut_missing(seen.missing),
        is_stopped=seen.is_stopped,
    )


def _seen_from(seen: pb.NodeSeen) -> ProbeResult:
    return ProbeResult(
        check_count(seen.number, "number"),
        ProcessSnapshot(
            cut_middle(seen.stacks, MAX_STACKS_BYTES),
            cut_middle(seen.process, MAX_PROCESS_BYTES),
            cut_output(seen.output),
            cut_missing(seen.missing),
            seen.is_stopped,
        ),
    )


def _look_from(look: pb.NodeLook) -> ProbeRequest:
    return ProbeRequest(
        check_count(look.number, "number"),
        _rank(look.rank),
        check_count(look.pid, "pid"),
        check_short(look.host, "host"),
        check_count(look.started, "started"),
        EvidenceOffer(check_count(look.signal, "signal"), check_count(look.descriptor, "descriptor")),
    )


def _entry(entry: pb.NodeEntry) -> HostHello:
    nnodes, nproc = _count(entry.nnodes, "nnodes"), _count(entry.nproc, "nproc")
    if not 0 < entry.node_rank < nnodes:
        raise InvalidRequest(f"is {entry.node_rank}; of {nnodes} hosts it is 1 to {nnodes - 1}", field="node_rank")
    return HostHello(
        check_name(entry.replica_id),
        check_name(entry.run, "run"),
        entry.node_rank,
        nnodes,
        nproc,
        check_name(entry.incarnation, "incarnation"),
    )


def _count(value: int, field: str) -> int:
    if not 0 < value <= MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {value}; it is 1 to {MAX_GROUP_WORLD_SIZE}", field=field)
    return value


def _rank(value: int) -> int:
    if value >= MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {value}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="rank")
    return value


def _status(value: int) -> int:
    if value not in _STATUSES:
        raise InvalidRequest(f"is {value}; it is an exit code, or minus a signal", field="status")
    return value


def _port(welcome: pb.NodeWelcome) -> int:
    if not 0 < welcome.master_port < 65536:
        raise InvalidRequest(f"is {welcome.master_port}; ports are 1 to 65535", field="master_port")
    return welcome.master_port
