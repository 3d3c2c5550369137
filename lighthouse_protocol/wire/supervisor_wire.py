"""To and from the messages of a supervisor's stream, with every check of a field.

Readers raise InvalidRequest that names the field. A kind of message that this version does not know is read as None and
is to be skipped.
"""

from lighthouse_protocol.constraints import check_seconds, check_short
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, cut_output, cut_reason
from lighthouse_protocol.messages.run import Done, RankId, Refusal, Stop
from lighthouse_protocol.messages.supervisor import (
    FromSupervisor,
    HostExcluded,
    ProcessLost,
    StopAsked,
    SupervisorHeartbeat,
    SupervisorHello,
    SupervisorWelcome,
    ToSupervisor,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.generation_wire import (
    done_from_wire,
    refusal_from_wire,
    refusal_to_wire,
    stop_from_wire,
    stop_to_wire,
)

# -- supervisor to lighthouse


def supervisor_request_to_wire(message: FromSupervisor) -> pb.SupervisorRequest:
    match message:
        case SupervisorHeartbeat():
            return pb.SupervisorRequest(beat=pb.SupervisorBeat())
        case SupervisorHello(name, incarnation, host, slots):
            entry = pb.SupervisorEntry(name=name, incarnation=incarnation, host=host, slots=slots)
            return pb.SupervisorRequest(entry=entry)
        case ProcessLost(rank, reason, output):
            lost = pb.WorkerLost(
                slot=rank.slot, incarnation=rank.incarnation, reason=cut_reason(reason), output=cut_output(output)
            )
            return pb.SupervisorRequest(lost=lost)
        case StopAsked(reason):
            return pb.SupervisorRequest(stop=pb.StopAsked(reason=cut_reason(reason)))
        case HostExcluded(reason):
            return pb.SupervisorRequest(excluded=pb.HostExcluded(reason=cut_reason(reason)))


def supervisor_request_from_wire(message: pb.SupervisorRequest) -> FromSupervisor | None:
    match message.WhichOneof("message"):
        case "beat":
            return SupervisorHeartbeat()
        case "entry":
            return _entry_from(message.entry)
        case "lost":
            lost = message.lost
            rank = RankId(_slot(lost.slot), check_name(lost.incarnation, "incarnation"))
            return ProcessLost(rank, cut_reason(lost.reason), cut_output(lost.output))
        case "stop":
            return StopAsked(cut_reason(message.stop.reason))
        case "excluded":
            return HostExcluded(cut_reason(message.excluded.reason))
        case _:
            return None


def _entry_from(entry: pb.SupervisorEntry) -> SupervisorHello:
    if len(entry.slots) > MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"are {len(entry.slots)}; at most {MAX_GROUP_WORLD_SIZE} are allowed", field="slots")
    return SupervisorHello(
        check_name(entry.name, "name"),
        check_name(entry.incarnation, "incarnation"),
        check_short(entry.host, "host"),
        tuple(map(_slot, entry.slots)),
    )


def _slot(slot: int) -> int:
    if slot >= MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {slot}; slots are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="slot")
    return slot


# -- lighthouse to supervisor


def supervisor_response_to_wire(message: ToSupervisor) -> pb.SupervisorResponse:
    match message:
        case SupervisorWelcome(beat_interval_s):
            return pb.SupervisorResponse(welcome=pb.SupervisorWelcome(beat_interval_s=beat_interval_s))
        case Stop():
            return pb.SupervisorResponse(stopped=stop_to_wire(message))
        case Done(number):
            return pb.SupervisorResponse(completed=pb.RunCompleted(number=number))
        case Refusal():
            return pb.SupervisorResponse(refusal=refusal_to_wire(message))


def supervisor_response_from_wire(message: pb.SupervisorResponse) -> ToSupervisor | None:
    match message.WhichOneof("message"):
        case "welcome":
            return SupervisorWelcome(check_seconds(message.welcome.beat_interval_s, "beat_interval_s"))
        case "stopped":
            return stop_from_wire(message.stopped)
        case "completed":
            return done_from_wire(message.completed)
        case "refusal":
            return refusal_from_wire(message.refusal)
        case _:
            return None
