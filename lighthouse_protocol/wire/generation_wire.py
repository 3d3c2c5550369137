"""To and from the messages of a rank's stream, with every check of a field.

Readers raise InvalidRequest that names the field. A kind of message that this version does not know is read as None and
is to be skipped.
"""

from lighthouse_protocol.constraints import check_number, check_seconds, check_short
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, cut_reason
from lighthouse_protocol.messages.run import (
    Counters,
    Done,
    Failure,
    Finish,
    FromRunRank,
    Over,
    RankHeartbeat,
    RankHello,
    RankId,
    Ready,
    Refusal,
    Stop,
    Terms,
    Told,
    ToRunRank,
    Welcome,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.status_codes import kind_of, refusal_of

# -- rank to lighthouse


def rank_request_to_wire(message: FromRunRank) -> pb.RankRequest:
    match message:
        case RankHeartbeat(step, phase):
            return pb.RankRequest(beat=pb.RankBeat(step=step, phase=phase))
        case Ready(generation):
            return pb.RankRequest(ready=pb.RankReady(generation=generation))
        case Failure(generation, reason):
            return pb.RankRequest(failure=pb.RankFailure(generation=generation, reason=cut_reason(reason)))
        case Finish(generation):
            return pb.RankRequest(finish=pb.RankFinish(generation=generation))
        case RankHello():
            return pb.RankRequest(entry=_entry(message))


def rank_request_from_wire(message: pb.RankRequest) -> FromRunRank | None:
    match message.WhichOneof("message"):
        case "beat":
            return RankHeartbeat(check_number(message.beat.step, "step"), check_short(message.beat.phase, "phase"))
        case "ready":
            return Ready(_generation(message.ready))
        case "failure":
            failure = message.failure
            return Failure(check_number(failure.generation, "generation"), cut_reason(failure.reason))
        case "finish":
            return Finish(check_number(message.finish.generation, "generation"))
        case "entry":
            return _entry_from(message.entry)
        case _:
            return None


def _entry(entry: RankHello) -> pb.RankEntry:
    return pb.RankEntry(
        slot=entry.rank.slot,
        incarnation=entry.rank.incarnation,
        terms=terms_to_wire(entry.terms),
        attempt=entry.attempt,
        host=entry.host,
        pid=entry.pid,
        generation=entry.generation,
        is_ready=entry.is_ready,
        seen=entry.seen,
        step=entry.step,
    )


def _entry_from(entry: pb.RankEntry) -> RankHello:
    if not entry.HasField("terms"):
        raise InvalidRequest("are missing; say what all ranks of the run agree on", field="terms")
    return RankHello(
        RankId(entry.slot, check_name(entry.incarnation, "incarnation")),
        terms_from_wire(entry.terms),
        attempt=entry.attempt,
        host=check_short(entry.host, "host"),
        pid=check_number(entry.pid, "pid"),
        generation=_generation(entry),
        is_ready=entry.is_ready,
        seen=check_number(entry.seen, "seen") if entry.HasField("seen") else None,
        step=check_number(entry.step, "step"),
    )


def terms_to_wire(terms: Terms) -> pb.RunTerms:
    return pb.RunTerms(
        world_size=terms.world_size,
        active=terms.active,
        min_active=terms.min_active,
        divisible_by=terms.divisible_by,
        hosts_together=terms.hosts_together,
        stride=terms.stride,
        join_timeout_s=terms.join_timeout_s,
        return_timeout_s=terms.return_timeout_s,
        max_iterations=terms.max_iterations,
    )


def terms_from_wire(message: pb.RunTerms) -> Terms:
    terms = Terms(
        world_size=_count(message.world_size, "world_size"),
        active=_count(message.active, "active") if message.HasField("active") else None,
        min_active=_count(message.min_active, "min_active"),
        divisible_by=_count(message.divisible_by, "divisible_by"),
        hosts_together=message.hosts_together,
        stride=_count(message.stride, "stride"),
        join_timeout_s=check_seconds(message.join_timeout_s, "join_timeout_s"),
        return_timeout_s=check_seconds(message.return_timeout_s, "return_timeout_s"),
        max_iterations=message.max_iterations if message.HasField("max_iterations") else None,
    )
    most = terms.target // terms.divisible_by * terms.divisible_by
    if most < terms.min_active:
        raise InvalidRequest(
            f"is {terms.min_active}; at most {most} ranks can be active (world_size, active, divisible_by)",
            field="min_active",
        )
    return terms


# -- lighthouse to rank


def rank_response_to_wire(message: ToRunRank) -> pb.RankResponse:
    match message:
        case Told(counters, slots):
            return pb.RankResponse(told=_told(counters, slots))
        case Over(number, reason):
            return pb.RankResponse(over=pb.GenerationOver(number=number, reason=cut_reason(reason)))
        case Stop():
            return pb.RankResponse(stopped=stop_to_wire(message))
        case Done(number):
            return pb.RankResponse(completed=pb.RunCompleted(number=number))
        case Refusal():
            return pb.RankResponse(refusal=refusal_to_wire(message))
        case Welcome():
            return pb.RankResponse(welcome=pb.RankWelcome())


def rank_response_from_wire(message: pb.RankResponse) -> ToRunRank | None:
    match message.WhichOneof("message"):
        case "told":
            return Told(_counters_from(message.told), tuple(message.told.slots))
        case "over":
            return Over(check_number(message.over.number, "number"), cut_reason(message.over.reason))
        case "stopped":
            return stop_from_wire(message.stopped)
        case "completed":
            return done_from_wire(message.completed)
        case "refusal":
            return refusal_from_wire(message.refusal)
        case "welcome":
            return Welcome()
        case _:
            return None


def _told(counters: Counters, slots: tuple[int, ...]) -> pb.GenerationTold:
    return pb.GenerationTold(
        number=counters.number,
        global_iteration=counters.global_iteration,
        job_restarts=counters.job_restarts,
        ranks_restarts=counters.ranks_restarts,
        slots=slots,
    )


def _counters_from(told: pb.GenerationTold) -> Counters:
    return Counters(
        number=check_number(told.number, "number"),
        global_iteration=check_number(told.global_iteration, "global_iteration"),
        job_restarts=check_number(told.job_restarts, "job_restarts"),
        ranks_restarts=check_number(told.ranks_restarts, "ranks_restarts"),
    )


# -- what a supervisor is told, too


def stop_to_wire(stop: Stop) -> pb.RunStopped:
    return pb.RunStopped(reason=cut_reason(stop.reason), who=cut_reason(stop.who), generation=stop.generation)


def stop_from_wire(stopped: pb.RunStopped) -> Stop:
    return Stop(cut_reason(stopped.reason), cut_reason(stopped.who), max(-1, stopped.generation))


def done_from_wire(completed: pb.RunCompleted) -> Done:
    return Done(check_number(completed.number, "number"))


def refusal_to_wire(refusal: Refusal) -> pb.RankRefusal:
    return pb.RankRefusal(kind=kind_of(refusal.error), text=cut_reason(str(refusal.error)))


def refusal_from_wire(refusal: pb.RankRefusal) -> Refusal:
    return Refusal(refusal_of(refusal.kind, refusal.text))


# -- fields


def _generation(message: pb.RankEntry | pb.RankReady) -> int | None:
    return check_number(message.generation, "generation") if message.HasField("generation") else None


def _count(value: int, field: str) -> int:
    if not 1 <= value <= MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {value}; 1 to {MAX_GROUP_WORLD_SIZE} are allowed", field=field)
    return value
