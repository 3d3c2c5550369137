"""to_wire / from_wire between session.py and the messages of a session and of a watch, with every check of a field.

Readers raise InvalidRequest that names the field. A kind of message that this version does not know, a newer peer's,
is read as None and is to be skipped.
"""

import math

from protos import lighthouse_pb2, manager_pb2, wire
from protos.limits import MAX_GROUP_WORLD_SIZE, MAX_QUORUM_ID, cut_reason
from protos.membership import Participant, Quorum, Vote
from protos.refusals import InvalidRequest, LighthouseError
from protos.session import (
    Ballot,
    Beat,
    Counted,
    DrainRequest,
    Echo,
    FromRank,
    Goodbye,
    Handed,
    Held,
    Hello,
    HoldMode,
    JoinRequest,
    Killed,
    KillRequest,
    Leave,
    Levels,
    Order,
    Phase,
    Refused,
    Revoked,
    ToLighthouse,
    ToManager,
    ToRank,
    WatchOpened,
    WatchRequest,
    Welcome,
    WithdrawRequest,
)

MAX_TEXT_CHARS = 512

_MODES = {mode: lighthouse_pb2.HoldMode.Value(f"HOLD_MODE_{mode.name}") for mode in HoldMode}
_PHASES = {phase: lighthouse_pb2.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}
_MODE_OF = {number: mode for mode, number in _MODES.items()}
_PHASE_OF = {number: phase for phase, number in _PHASES.items()}
_REFUSALS = {cls.__name__: cls for cls in (LighthouseError, *LighthouseError.__subclasses__())}


# -- manager to lighthouse


def session_request_to_wire(message: ToLighthouse) -> lighthouse_pb2.SessionRequest:
    match message:
        case Beat(number, levels):
            return lighthouse_pb2.SessionRequest(beat=lighthouse_pb2.Beat(number=number, levels=_levels(levels)))
        case JoinRequest(number, participant, time_left_s):
            member = wire.participant_to_native(participant)
            join = lighthouse_pb2.Join(number=number, participant=member, time_left_s=time_left_s)
            return lighthouse_pb2.SessionRequest(join=join)
        case WithdrawRequest(number):
            return lighthouse_pb2.SessionRequest(withdraw=lighthouse_pb2.Withdraw(number=number))
        case Hello(participant, levels):
            hello = lighthouse_pb2.Hello(participant=wire.participant_to_native(participant), levels=_levels(levels))
            return lighthouse_pb2.SessionRequest(hello=hello)
        case Leave(reason):
            return lighthouse_pb2.SessionRequest(leave=lighthouse_pb2.Leave(reason=cut_reason(reason)))


def session_request_from_wire(message: lighthouse_pb2.SessionRequest) -> ToLighthouse | None:
    match message.WhichOneof("message"):
        case "beat":
            return Beat(_count(message.beat.number, "number"), _levels_from(message.beat.levels))
        case "join":
            return _join_from(message.join)
        case "withdraw":
            return WithdrawRequest(_count(message.withdraw.number, "number"))
        case "hello":
            return Hello(_participant_from(message.hello), _levels_from(message.hello.levels))
        case "leave":
            return Leave(cut_reason(message.leave.reason))
        case _:
            return None


def _join_from(join: lighthouse_pb2.Join) -> JoinRequest:
    time_left_s = _seconds(join.time_left_s, "time_left_s")
    return JoinRequest(_count(join.number, "number"), _participant_from(join), time_left_s)


def _participant_from(message: lighthouse_pb2.Hello | lighthouse_pb2.Join) -> Participant:
    if not message.HasField("participant"):
        raise InvalidRequest("is missing; say who asks", field="participant")
    return wire.participant_from_native(message.participant)


def _levels(levels: Levels) -> lighthouse_pb2.Levels:
    held = levels.held
    return lighthouse_pb2.Levels(
        held=None if held is None else _held(held), drains=levels.drains, down=cut_reason(levels.down)
    )


def _held(held: Held) -> lighthouse_pb2.Held:
    return lighthouse_pb2.Held(quorum_id=held.quorum_id, mode=_MODES[held.mode], granted=held.granted)


def _levels_from(message: lighthouse_pb2.Levels) -> Levels:
    held = _held_from(message.held) if message.HasField("held") else None
    return Levels(held, message.drains, cut_reason(message.down))


def _held_from(message: lighthouse_pb2.Held) -> Held:
    mode = _MODE_OF.get(message.mode)
    if mode is None:
        raise InvalidRequest(f"is {message.mode}; this version knows 1 to {len(_MODES)}", field="mode")
    return Held(_quorum_id(message.quorum_id), mode, _count(message.granted, "granted"))


# -- lighthouse to manager


def session_response_to_wire(message: ToManager, *, created_at: float = 0.0) -> lighthouse_pb2.SessionResponse:
    """`created_at` of a Handed's quorum, in seconds since the epoch."""
    match message:
        case Echo(number, heartbeat_interval_s, order):
            echo = lighthouse_pb2.Echo(
                number=number, heartbeat_interval_s=heartbeat_interval_s, order=_order_or_none(order)
            )
            return lighthouse_pb2.SessionResponse(echo=echo)
        case Handed(join, quorum, stands):
            native = wire.quorum_to_native(quorum, created_at).quorum
            return lighthouse_pb2.SessionResponse(handed=lighthouse_pb2.Handed(join=join, quorum=native, stands=stands))
        case Order():
            return lighthouse_pb2.SessionResponse(order=_order(message))
        case Welcome(heartbeat_interval_s, lease_s, order):
            welcome = lighthouse_pb2.Welcome(
                heartbeat_interval_s=heartbeat_interval_s, lease_s=lease_s, order=_order_or_none(order)
            )
            return lighthouse_pb2.SessionResponse(welcome=welcome)
        case Refused(join, error):
            refused = lighthouse_pb2.Refused(join=join, kind=_kind(error), text=cut_reason(str(error)))
            return lighthouse_pb2.SessionResponse(refused=refused)
        case DrainRequest(reason):
            return lighthouse_pb2.SessionResponse(drain=lighthouse_pb2.Drain(reason=cut_reason(reason)))
        case KillRequest(reason):
            return lighthouse_pb2.SessionResponse(kill=lighthouse_pb2.Kill(reason=cut_reason(reason)))
        case Goodbye(reason):
            return lighthouse_pb2.SessionResponse(goodbye=lighthouse_pb2.Goodbye(reason=cut_reason(reason)))


def handed_shared(quorum: Quorum, stands: bool, created_at: float) -> bytes:
    """What a Handed is for every session, serialised once."""
    return session_response_to_wire(Handed(0, quorum, stands), created_at=created_at).SerializeToString()


def handed_for(shared: bytes, join: int) -> bytes:
    """The answer to join `join`. A reader merges serialisations of one embedded message that stand in a row."""
    return shared + lighthouse_pb2.SessionResponse(handed=lighthouse_pb2.Handed(join=join)).SerializeToString()


def order_bytes(order: Order) -> bytes:
    """The same for every session."""
    return session_response_to_wire(order).SerializeToString()


def session_response_from_wire(message: lighthouse_pb2.SessionResponse) -> ToManager | None:
    match message.WhichOneof("message"):
        case "echo":
            interval_s = _seconds(message.echo.heartbeat_interval_s, "heartbeat_interval_s")
            order = _order_from(message.echo.order) if message.echo.HasField("order") else None
            return Echo(_count(message.echo.number, "number"), interval_s, order)
        case "handed":
            return _handed_from(message.handed)
        case "order":
            return _order_from(message.order)
        case "welcome":
            return _welcome_from(message.welcome)
        case "refused":
            return Refused(_count(message.refused.join, "join"), _error_from(message.refused))
        case "drain":
            return DrainRequest(cut_reason(message.drain.reason))
        case "kill":
            return KillRequest(cut_reason(message.kill.reason))
        case "goodbye":
            return Goodbye(cut_reason(message.goodbye.reason))
        case _:
            return None


def _handed_from(message: lighthouse_pb2.Handed) -> Handed:
    if not message.HasField("quorum"):
        raise InvalidRequest("is missing", field="quorum")
    _quorum_id(message.quorum.quorum_id)
    return Handed(_count(message.join, "join"), wire.quorum_from_native(message.quorum), message.stands)


def _welcome_from(message: lighthouse_pb2.Welcome) -> Welcome:
    interval_s = _seconds(message.heartbeat_interval_s, "heartbeat_interval_s")
    order = _order_from(message.order) if message.HasField("order") else None
    return Welcome(interval_s, _seconds(message.lease_s, "lease_s"), order)


def _order(order: Order) -> lighthouse_pb2.Order:
    return lighthouse_pb2.Order(
        quorum_id=order.quorum_id, phase=_PHASES[order.phase], upto=order.upto, reason=cut_reason(order.reason)
    )


def _order_or_none(order: Order | None) -> lighthouse_pb2.Order | None:
    return None if order is None else _order(order)


def _order_from(message: lighthouse_pb2.Order) -> Order:
    phase = _PHASE_OF.get(message.phase)
    if phase is None:
        raise InvalidRequest(f"is {message.phase}; this version knows 1 to {len(_PHASES)}", field="phase")
    return Order(_quorum_id(message.quorum_id), phase, _count(message.upto, "upto"), cut_reason(message.reason))


def _kind(error: LighthouseError) -> str:
    """The name that the other side knows it by: a more special refusal goes as its kind."""
    return next(cls.__name__ for cls in type(error).__mro__ if _REFUSALS.get(cls.__name__) is cls)


def _error_from(message: lighthouse_pb2.Refused | manager_pb2.Counted) -> LighthouseError:
    """A refusal that only a newer version knows is a plain one."""
    return _REFUSALS.get(message.kind, LighthouseError)(cut_reason(message.text))


# -- rank and manager


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
    return manager_pb2.WatchRequest(
        rank=request.group_rank, worker=request.worker, pid=request.pid, host=request.host, started=request.started
    )


def watch_request_from_wire(message: manager_pb2.WatchRequest) -> WatchRequest:
    if not 0 <= message.rank < MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {message.rank}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="rank")
    if not message.worker:
        raise InvalidRequest("is empty; name the process, anew at every start", field="worker")
    return WatchRequest(
        message.rank,
        _short(message.worker, "worker"),
        _count(message.pid, "pid"),
        _short(message.host, "host"),
        _count(message.started, "started"),
    )


def ballot_from_wire(message: manager_pb2.WatchRequest) -> Ballot:
    if not message.HasField("ballot"):
        raise InvalidRequest("is missing; after its first message a watch takes votes only", field="ballot")
    ballot = message.ballot
    quorum_id = ballot.quorum_id if ballot.HasField("quorum_id") else None
    time_left_s = _seconds(ballot.time_left_s, "time_left_s")
    return Ballot(ballot.number, ballot.step, ballot.should_commit, quorum_id, ballot.wants_next, time_left_s)


def watch_response_to_wire(message: ToRank) -> manager_pb2.WatchResponse:
    match message:
        case WatchOpened():
            return manager_pb2.WatchResponse(opened=manager_pb2.WatchOpened())
        case Revoked(quorum_id, reason):
            return manager_pb2.WatchResponse(
                revoked=manager_pb2.Revoked(quorum_id=quorum_id, reason=cut_reason(reason))
            )
        case Counted(number, outcome):
            return manager_pb2.WatchResponse(counted=_counted(number, outcome))
        case Killed(reason):
            return manager_pb2.WatchResponse(killed=manager_pb2.Killed(reason=cut_reason(reason)))


def watch_response_from_wire(message: manager_pb2.WatchResponse) -> ToRank | None:
    match message.WhichOneof("message"):
        case "opened":
            return WatchOpened()
        case "revoked":
            return Revoked(_quorum_id(message.revoked.quorum_id), cut_reason(message.revoked.reason))
        case "killed":
            return Killed(cut_reason(message.killed.reason))
        case "counted":
            return _counted_from(message.counted)
        case _:
            return None


def _counted(number: int, outcome: Vote | LighthouseError) -> manager_pb2.Counted:
    if isinstance(outcome, LighthouseError):
        return manager_pb2.Counted(number=number, kind=_kind(outcome), text=cut_reason(str(outcome)))
    return manager_pb2.Counted(number=number, answer=wire.vote_to_native(outcome.commit, outcome.next))


def _counted_from(message: manager_pb2.Counted) -> Counted:
    outcome = wire.vote_from_native(message.answer) if message.HasField("answer") else _error_from(message)
    return Counted(message.number, outcome)


# -- fields


def _quorum_id(value: int) -> int:
    if not 0 <= value <= MAX_QUORUM_ID:
        raise InvalidRequest(f"is {value}; quorum ids are 0 to {MAX_QUORUM_ID}", field="quorum_id")
    return value


def _count(value: int, field: str) -> int:
    if value < 0:
        raise InvalidRequest(f"is {value}; it counts from 0", field=field)
    return value


def _seconds(value: float, field: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InvalidRequest(f"is {value}; it is a positive number of seconds", field=field)
    return value


def _short(text: str, field: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"has {len(text)} characters; at most {MAX_TEXT_CHARS}", field=field)
    return text
