"""to_wire / from_wire between session.py and the messages of a session, with every check of a field.

Readers raise InvalidRequest that names the field. A kind of message that this version does not know, a newer peer's,
is read as None and is to be skipped.
"""

from contextlib import suppress

from lighthouse_protocol.constraints import check_count, check_group_rank, check_quorum_id, check_seconds
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE, MAX_REQUEST_BYTES, cut_reason
from lighthouse_protocol.messages.membership import Participant, Quorum, World
from lighthouse_protocol.messages.progress import GroupView
from lighthouse_protocol.messages.session import (
    DrainRequest,
    Evidence,
    EvidenceDone,
    EvidenceRequest,
    Goodbye,
    GroupReport,
    Heartbeat,
    HeartbeatAck,
    HeldQuorum,
    Hello,
    HoldState,
    JoinAccepted,
    JoinRejected,
    JoinRequest,
    KillRequest,
    Leave,
    QuorumOrder,
    QuorumPhase,
    ToLighthouse,
    ToManager,
    Welcome,
    WithdrawRequest,
)
from lighthouse_protocol.pb.documented import lighthouse_pb2
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire import documented
from lighthouse_protocol.wire.codecs import RANK_EVIDENCE, WORLD
from lighthouse_protocol.wire.progress_wire import fitting_group_view, group_view_from_wire
from lighthouse_protocol.wire.rank_set import ranks_from_bits, ranks_to_bits
from lighthouse_protocol.wire.status_codes import kind_of, refusal_of

MAX_PROGRESS_BYTES = MAX_REQUEST_BYTES // 2

_MODES = {mode: lighthouse_pb2.HoldMode.Value(f"HOLD_MODE_{mode.name}") for mode in HoldState}
_PHASES = {phase: lighthouse_pb2.Phase.Value(f"PHASE_{phase.name}") for phase in QuorumPhase}
_MODE_OF = {number: mode for mode, number in _MODES.items()}
_PHASE_OF = {number: phase for phase, number in _PHASES.items()}


# -- manager to lighthouse


def session_request_to_wire(message: ToLighthouse) -> lighthouse_pb2.SessionRequest:
    match message:
        case Heartbeat(number, levels, view):
            progress = None if view is None else fitting_group_view(view, MAX_PROGRESS_BYTES)
            return lighthouse_pb2.SessionRequest(
                beat=lighthouse_pb2.Beat(number=number, levels=_levels(levels), progress=progress)
            )
        case JoinRequest(number, participant, time_left_s):
            member = documented.participant_to_native(participant)
            join = lighthouse_pb2.Join(number=number, participant=member, time_left_s=time_left_s)
            return lighthouse_pb2.SessionRequest(join=join)
        case WithdrawRequest(number):
            return lighthouse_pb2.SessionRequest(withdraw=lighthouse_pb2.Withdraw(number=number))
        case Hello(participant, levels, gives_evidence, takes_world):
            member = documented.participant_to_native(participant)
            hello = lighthouse_pb2.Hello(
                participant=member, levels=_levels(levels), gives_evidence=gives_evidence, takes_world=takes_world
            )
            return lighthouse_pb2.SessionRequest(hello=hello)
        case Leave(reason):
            return lighthouse_pb2.SessionRequest(leave=lighthouse_pb2.Leave(reason=cut_reason(reason)))
        case Evidence(number, rank):
            evidence = lighthouse_pb2.Evidence(number=number, rank=RANK_EVIDENCE.write(rank))
            return lighthouse_pb2.SessionRequest(evidence=evidence)
        case EvidenceDone(number):
            return lighthouse_pb2.SessionRequest(evidence_done=lighthouse_pb2.EvidenceDone(number=number))


def session_request_from_wire(message: lighthouse_pb2.SessionRequest) -> ToLighthouse | None:
    match message.WhichOneof("message"):
        case "beat":
            beat = message.beat
            return Heartbeat(check_count(beat.number, "number"), _levels_from(beat.levels), _progress_from(beat))
        case "join":
            return _join_from(message.join)
        case "withdraw":
            return WithdrawRequest(check_count(message.withdraw.number, "number"))
        case "hello":
            hello = message.hello
            return Hello(_participant_from(hello), _levels_from(hello.levels), hello.gives_evidence, hello.takes_world)
        case "evidence":
            return _evidence_from(message.evidence)
        case "evidence_done":
            return EvidenceDone(check_count(message.evidence_done.number, "number"))
        case "leave":
            return Leave(cut_reason(message.leave.reason))
        case _:
            return None


def _progress_from(beat: lighthouse_pb2.Beat) -> GroupView | None:
    """It is for a person to see: what this version cannot read of a newer one's is no reason to end the session."""
    with suppress(InvalidRequest):
        return group_view_from_wire(beat.progress) if beat.HasField("progress") else None
    return None


def _evidence_from(message: lighthouse_pb2.Evidence) -> Evidence | None:
    """For a person to see, too."""
    with suppress(InvalidRequest):
        return Evidence(check_count(message.number, "number"), RANK_EVIDENCE.read(message.rank))
    return None


def _join_from(join: lighthouse_pb2.Join) -> JoinRequest:
    time_left_s = check_seconds(join.time_left_s, "time_left_s")
    return JoinRequest(check_count(join.number, "number"), _participant_from(join), time_left_s)


def _participant_from(message: lighthouse_pb2.Hello | lighthouse_pb2.Join) -> Participant:
    if not message.HasField("participant"):
        raise InvalidRequest("is missing; say who asks", field="participant")
    return documented.participant_from_native(message.participant)


def _levels(levels: GroupReport) -> lighthouse_pb2.Levels:
    held = levels.held
    return lighthouse_pb2.Levels(
        held=None if held is None else _held(held),
        drains=levels.drains,
        down=cut_reason(levels.down),
        missing=ranks_to_bits(levels.missing),
    )


def _held(held: HeldQuorum) -> lighthouse_pb2.Held:
    mode = _MODES[held.mode]
    return lighthouse_pb2.Held(quorum_id=held.quorum_id, mode=mode, granted=held.granted, wants_next=held.wants_next)


def _levels_from(message: lighthouse_pb2.Levels) -> GroupReport:
    held = _held_from(message.held) if message.HasField("held") else None
    return GroupReport(held, message.drains, cut_reason(message.down), ranks_from_bits(message.missing, "missing"))


def _held_from(message: lighthouse_pb2.Held) -> HeldQuorum:
    mode = _MODE_OF.get(message.mode)
    if mode is None:
        raise InvalidRequest(f"is {message.mode}; this version knows 1 to {len(_MODES)}", field="mode")
    return HeldQuorum(
        check_quorum_id(message.quorum_id), mode, check_count(message.granted, "granted"), message.wants_next
    )


# -- lighthouse to manager


def session_response_to_wire(message: ToManager, *, created_at: float = 0.0) -> lighthouse_pb2.SessionResponse:
    """`created_at` of a Handed's quorum, in seconds since the epoch."""
    match message:
        case HeartbeatAck(number, heartbeat_interval_s, order):
            echo = lighthouse_pb2.Echo(
                number=number, heartbeat_interval_s=heartbeat_interval_s, order=_order_or_none(order)
            )
            return lighthouse_pb2.SessionResponse(echo=echo)
        case JoinAccepted(join, quorum, stands):
            native = documented.quorum_to_native(quorum, created_at).quorum
            return lighthouse_pb2.SessionResponse(handed=lighthouse_pb2.Handed(join=join, quorum=native, stands=stands))
        case QuorumOrder():
            return lighthouse_pb2.SessionResponse(order=_order(message))
        case Welcome(heartbeat_interval_s, lease_s, order):
            welcome = lighthouse_pb2.Welcome(
                heartbeat_interval_s=heartbeat_interval_s, lease_s=lease_s, order=_order_or_none(order)
            )
            return lighthouse_pb2.SessionResponse(welcome=welcome)
        case JoinRejected(join, error):
            refused = lighthouse_pb2.Refused(join=join, kind=kind_of(error), text=cut_reason(str(error)))
            return lighthouse_pb2.SessionResponse(refused=refused)
        case DrainRequest(reason):
            return lighthouse_pb2.SessionResponse(drain=lighthouse_pb2.Drain(reason=cut_reason(reason)))
        case KillRequest(reason):
            return lighthouse_pb2.SessionResponse(kill=lighthouse_pb2.Kill(reason=cut_reason(reason)))
        case Goodbye(reason):
            return lighthouse_pb2.SessionResponse(goodbye=lighthouse_pb2.Goodbye(reason=cut_reason(reason)))
        case EvidenceRequest(number, group_ranks):
            request = lighthouse_pb2.EvidenceRequest(number=number, group_ranks=group_ranks)
            return lighthouse_pb2.SessionResponse(evidence=request)
        case World():
            return lighthouse_pb2.SessionResponse(world=WORLD.write(message))


def handed_shared(quorum: Quorum, stands: bool, created_at: float) -> bytes:
    """What a Handed is for every session, serialised once."""
    return session_response_to_wire(JoinAccepted(0, quorum, stands), created_at=created_at).SerializeToString()


def handed_for(shared: bytes, join: int) -> bytes:
    """The answer to join `join`. A reader merges serialisations of one embedded message that stand in a row."""
    return shared + lighthouse_pb2.SessionResponse(handed=lighthouse_pb2.Handed(join=join)).SerializeToString()


def order_bytes(order: QuorumOrder) -> bytes:
    """The same for every session."""
    return session_response_to_wire(order).SerializeToString()


def world_bytes(world: World) -> bytes:
    """The same for every session."""
    return session_response_to_wire(world).SerializeToString()


def session_response_from_wire(message: lighthouse_pb2.SessionResponse) -> ToManager | None:
    match message.WhichOneof("message"):
        case "echo":
            interval_s = check_seconds(message.echo.heartbeat_interval_s, "heartbeat_interval_s")
            order = _order_from(message.echo.order) if message.echo.HasField("order") else None
            return HeartbeatAck(check_count(message.echo.number, "number"), interval_s, order)
        case "handed":
            return _handed_from(message.handed)
        case "order":
            return _order_from(message.order)
        case "welcome":
            return _welcome_from(message.welcome)
        case "refused":
            return JoinRejected(
                check_count(message.refused.join, "join"), refusal_of(message.refused.kind, message.refused.text)
            )
        case "drain":
            return DrainRequest(cut_reason(message.drain.reason))
        case "kill":
            return KillRequest(cut_reason(message.kill.reason))
        case "goodbye":
            return Goodbye(cut_reason(message.goodbye.reason))
        case "evidence":
            return _evidence_request_from(message.evidence)
        case "world":
            return WORLD.read(message.world)
        case _:
            return None


def _handed_from(message: lighthouse_pb2.Handed) -> JoinAccepted:
    if not message.HasField("quorum"):
        raise InvalidRequest("is missing", field="quorum")
    check_quorum_id(message.quorum.quorum_id)
    return JoinAccepted(
        check_count(message.join, "join"), documented.quorum_from_native(message.quorum), message.stands
    )


def _welcome_from(message: lighthouse_pb2.Welcome) -> Welcome:
    interval_s = check_seconds(message.heartbeat_interval_s, "heartbeat_interval_s")
    order = _order_from(message.order) if message.HasField("order") else None
    return Welcome(interval_s, check_seconds(message.lease_s, "lease_s"), order)


def _evidence_request_from(message: lighthouse_pb2.EvidenceRequest) -> EvidenceRequest:
    if len(message.group_ranks) > MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(
            f"has {len(message.group_ranks)} entries; at most {MAX_GROUP_WORLD_SIZE}", field="group_ranks"
        )
    return EvidenceRequest(check_count(message.number, "number"), tuple(map(check_group_rank, message.group_ranks)))


def _order(order: QuorumOrder) -> lighthouse_pb2.Order:
    return lighthouse_pb2.Order(
        quorum_id=order.quorum_id,
        phase=_PHASES[order.phase],
        upto=order.upto,
        reason=cut_reason(order.reason),
        lost=cut_reason(order.lost),
    )


def _order_or_none(order: QuorumOrder | None) -> lighthouse_pb2.Order | None:
    return None if order is None else _order(order)


def _order_from(message: lighthouse_pb2.Order) -> QuorumOrder:
    phase = _PHASE_OF.get(message.phase)
    if phase is None:
        raise InvalidRequest(f"is {message.phase}; this version knows 1 to {len(_PHASES)}", field="phase")
    return QuorumOrder(
        check_quorum_id(message.quorum_id),
        phase,
        check_count(message.upto, "upto"),
        cut_reason(message.reason),
        cut_reason(message.lost),
    )
