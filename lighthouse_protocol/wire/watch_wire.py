"""to_wire / from_wire between session.py and the messages of a rank's watch, with every check of a field.

Readers raise InvalidRequest that names the field. What a newer manager says and this version does not know is read as
None and is to be skipped.
"""

from contextlib import suppress

from lighthouse_protocol.constraints import check_count, check_quorum_id, check_seconds, check_short
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, cut_reason
from lighthouse_protocol.messages.evidence import MAX_STACKS_BYTES, SelfReport, cut_middle, cut_missing
from lighthouse_protocol.messages.membership import Vote, World
from lighthouse_protocol.messages.progress import Sample
from lighthouse_protocol.messages.session import (
    Ballot,
    Counted,
    EvidenceAsked,
    EvidenceOffer,
    FromRank,
    Killed,
    Leaving,
    RankGone,
    Released,
    Revoked,
    ToRank,
    Waiting,
    WatchOpened,
    WatchRequest,
)
from lighthouse_protocol.pb.documented import manager_pb2
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.codecs import WORLD
from lighthouse_protocol.wire.progress_wire import sample_from_wire, sample_to_wire
from lighthouse_protocol.wire.status_codes import kind_of, refusal_of


def watch_request_to_wire(request: FromRank) -> manager_pb2.WatchRequest:
    if isinstance(request, Ballot):
        return manager_pb2.WatchRequest(
            ballot=manager_pb2.Ballot(
                number=request.number,
                step=request.step,
                should_commit=request.vote,
                quorum_id=request.quorum_id,
                wants_next=request.wants_next,
                time_left_s=request.time_left_s,
            )
        )
    if isinstance(request, Sample):
        return manager_pb2.WatchRequest(progress=sample_to_wire(request))
    if isinstance(request, Leaving):
        return manager_pb2.WatchRequest(leaving=manager_pb2.Leaving(step=request.step))
    if isinstance(request, SelfReport):
        return manager_pb2.WatchRequest(evidence=_evidence(request))
    offer = request.offer
    return manager_pb2.WatchRequest(
        rank=request.group_rank,
        worker=request.worker,
        pid=request.pid,
        host=request.host,
        started=request.started,
        hostname=request.hostname,
        offer=None if offer is None else manager_pb2.EvidenceOffer(signal=offer.signal, descriptor=offer.descriptor),
        takes_world=request.takes_world,
    )


def watch_request_from_wire(message: manager_pb2.WatchRequest) -> WatchRequest:
    if not 0 <= message.rank < MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {message.rank}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="rank")
    if not message.worker:
        raise InvalidRequest("is empty; name the process, anew at every start", field="worker")
    return WatchRequest(
        message.rank,
        check_short(message.worker, "worker"),
        check_count(message.pid, "pid"),
        check_short(message.host, "host"),
        check_count(message.started, "started"),
        check_short(message.hostname, "hostname"),
        _offer_from(message.offer) if message.HasField("offer") else None,
        message.takes_world,
    )


def _offer_from(message: manager_pb2.EvidenceOffer) -> EvidenceOffer:
    return EvidenceOffer(check_count(message.signal, "signal"), check_count(message.descriptor, "descriptor"))


def word_from_wire(message: manager_pb2.WatchRequest) -> Ballot | Sample | SelfReport | Leaving | None:
    """What a rank says after its first message. Where it is and what it does is for a person to see: what this version
    cannot read of that is no reason to end the watch."""
    if message.HasField("leaving"):
        return Leaving(check_count(message.leaving.step, "step") if message.leaving.HasField("step") else None)
    if not (message.HasField("progress") or message.HasField("evidence")):
        return ballot_from_wire(message)
    with suppress(InvalidRequest):
        return sample_from_wire(message.progress) if message.HasField("progress") else _evidence_from(message.evidence)
    return None


def ballot_from_wire(message: manager_pb2.WatchRequest) -> Ballot:
    if not message.HasField("ballot"):
        raise InvalidRequest("is missing; after its first message a watch takes votes and progress", field="ballot")
    ballot = message.ballot
    quorum_id = ballot.quorum_id if ballot.HasField("quorum_id") else None
    time_left_s = check_seconds(ballot.time_left_s, "time_left_s")
    return Ballot(ballot.number, ballot.step, ballot.should_commit, quorum_id, ballot.wants_next, time_left_s)


def _evidence(evidence: SelfReport) -> manager_pb2.OwnEvidence:
    """Stacks that are too long are cut."""
    return manager_pb2.OwnEvidence(
        number=evidence.number,
        stacks=cut_middle(evidence.stacks, MAX_STACKS_BYTES),
        flight_recorder=evidence.flight_recorder,
        missing=cut_missing(evidence.missing),
    )


def _evidence_from(message: manager_pb2.OwnEvidence) -> SelfReport:
    return SelfReport(
        check_count(message.number, "number"),
        cut_middle(message.stacks, MAX_STACKS_BYTES),
        message.flight_recorder,
        cut_missing(message.missing),
    )


def watch_response_to_wire(message: ToRank) -> manager_pb2.WatchResponse:
    match message:
        case WatchOpened(takes_progress, takes_leave):
            opened = manager_pb2.WatchOpened(takes_progress=takes_progress, takes_leave=takes_leave)
            return manager_pb2.WatchResponse(opened=opened)
        case RankGone(group_rank, reason):
            return manager_pb2.WatchResponse(gone=manager_pb2.RankGone(rank=group_rank, reason=cut_reason(reason)))
        case Released():
            return manager_pb2.WatchResponse(released=manager_pb2.Released())
        case Waiting(reason):
            return manager_pb2.WatchResponse(waiting=manager_pb2.Waiting(reason=cut_reason(reason)))
        case Revoked(quorum_id, reason, lost):
            revoked = manager_pb2.Revoked(quorum_id=quorum_id, reason=cut_reason(reason), lost=cut_reason(lost))
            return manager_pb2.WatchResponse(revoked=revoked)
        case Counted(number, outcome):
            return manager_pb2.WatchResponse(counted=_counted(number, outcome))
        case Killed(reason):
            return manager_pb2.WatchResponse(killed=manager_pb2.Killed(reason=cut_reason(reason)))
        case EvidenceAsked(number):
            return manager_pb2.WatchResponse(evidence=manager_pb2.EvidenceAsked(number=number))
        case World():
            return manager_pb2.WatchResponse(world=WORLD.write(message))


def watch_response_from_wire(message: manager_pb2.WatchResponse) -> ToRank | None:
    match message.WhichOneof("message"):
        case "opened":
            return WatchOpened(message.opened.takes_progress, message.opened.takes_leave)
        case "gone":
            return RankGone(check_count(message.gone.rank, "rank"), cut_reason(message.gone.reason))
        case "released":
            return Released()
        case "waiting":
            return Waiting(cut_reason(message.waiting.reason))
        case "world":
            return WORLD.read(message.world)
        case "revoked":
            told = message.revoked
            return Revoked(check_quorum_id(told.quorum_id), cut_reason(told.reason), cut_reason(told.lost))
        case "killed":
            return Killed(cut_reason(message.killed.reason))
        case "counted":
            return _counted_from(message.counted)
        case "evidence":
            return EvidenceAsked(check_count(message.evidence.number, "number"))
        case _:
            return None


def _counted(number: int, outcome: Vote | LighthouseError) -> manager_pb2.Counted:
    if isinstance(outcome, LighthouseError):
        return manager_pb2.Counted(number=number, kind=kind_of(outcome), text=cut_reason(str(outcome)))
    return manager_pb2.Counted(number=number, answer=documented.vote_to_native(outcome.commit, outcome.next))


def _counted_from(message: manager_pb2.Counted) -> Counted:
    outcome = (
        documented.vote_from_native(message.answer)
        if message.HasField("answer")
        else refusal_of(message.kind, message.text)
    )
    return Counted(message.number, outcome)
