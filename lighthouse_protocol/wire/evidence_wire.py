"""To and from the messages of evidence.proto, with every check of a field. Readers raise InvalidRequest naming it."""

from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.evidence import RankEvidence, fitting
from lighthouse_protocol.pb.extensions import evidence_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.fields import check_age, check_count, check_short


def evidence_to_wire(evidence: RankEvidence) -> pb.RankEvidence:
    """What is too long is cut."""
    evidence = fitting(evidence)
    return pb.RankEvidence(
        group_rank=evidence.group_rank,
        worker=evidence.worker,
        pid=evidence.pid,
        host=evidence.host,
        stacks=evidence.stacks,
        flight_recorder=evidence.flight_recorder,
        process=evidence.process,
        output=evidence.output,
        missing=evidence.missing,
        took_s=evidence.took_s,
    )


def evidence_from_wire(message: pb.RankEvidence) -> RankEvidence:
    """What is too long is cut: it is for a person to read."""
    return fitting(
        RankEvidence(
            check_group_rank(message.group_rank),
            check_short(message.worker, "worker"),
            check_count(message.pid, "pid"),
            check_short(message.host, "host"),
            message.stacks,
            message.flight_recorder,
            message.process,
            tuple(message.output),
            tuple(message.missing),
            check_age(message.took_s, "took_s"),
        )
    )


def check_group_rank(value: int) -> int:
    if not 0 <= value < MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {value}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="group_rank")
    return value
