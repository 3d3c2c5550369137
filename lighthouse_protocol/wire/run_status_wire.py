"""to_wire / from_wire between run_status.py and its messages; keys of a run, and what names one.

Readers raise InvalidRequest that names the field.
"""

from collections.abc import Iterable, Mapping

from lighthouse_protocol.constraints import check_number
from lighthouse_protocol.messages.run import Counters, KeyKind
from lighthouse_protocol.messages.run_status import (
    ExcludedHost,
    RankStatus,
    RunStatus,
    SupervisorStatus,
)
from lighthouse_protocol.pb.extensions import generation_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.doubles_wire import check_doubles
from lighthouse_protocol.wire.generation_wire import stop_from_wire, stop_to_wire, terms_from_wire, terms_to_wire

Keys = Mapping[tuple[KeyKind, str], bytes]


# -- keys


def check_kind(kind: str) -> KeyKind:
    try:
        return KeyKind(kind)
    except ValueError:
        raise InvalidRequest(f"is {kind!r}; {', '.join(KeyKind)} are known", field="kind") from None


def keys_to_wire(generation: int, keys: Keys) -> pb.GetKeysResponse:
    rows = [pb.Key(kind=kind, name=name, value=value) for (kind, name), value in keys.items()]
    return pb.GetKeysResponse(generation=generation, keys=rows)


def keys_from_wire(message: pb.GetKeysResponse) -> tuple[int, dict[tuple[KeyKind, str], bytes]]:
    """Kinds that only a newer lighthouse knows are skipped."""
    keys = {(KeyKind(key.kind), key.name): key.value for key in message.keys if key.kind in set(KeyKind)}
    return _last(message.generation, "generation"), keys


# -- status


def runs_to_wire(runs: Iterable[RunStatus]) -> pb.RunsResponse:
    return pb.RunsResponse(runs=map(run_to_wire, runs))


def runs_from_wire(message: pb.RunsResponse) -> tuple[RunStatus, ...]:
    check_doubles(message)
    return tuple(map(run_from_wire, message.runs))


def run_to_wire(run: RunStatus) -> pb.RunStatus:
    return pb.RunStatus(
        job=run.job,
        run=run.run,
        verdict=run.verdict,
        number=run.counters.number,
        global_iteration=run.counters.global_iteration,
        job_restarts=run.counters.job_restarts,
        ranks_restarts=run.counters.ranks_restarts,
        terms=terms_to_wire(run.terms),
        slots=run.slots,
        is_complete=run.is_complete,
        stop=None if run.stop is None else stop_to_wire(run.stop),
        ranks=map(_rank, run.ranks),
        supervisors=map(_supervisor, run.supervisors),
        excluded=map(_excluded, run.excluded),
    )


def run_from_wire(message: pb.RunStatus) -> RunStatus:
    return RunStatus(
        job=message.job,
        run=message.run,
        verdict=message.verdict,
        counters=Counters(
            _last(message.number, "number"),
            check_number(message.global_iteration, "global_iteration"),
            check_number(message.job_restarts, "job_restarts"),
            check_number(message.ranks_restarts, "ranks_restarts"),
        ),
        terms=terms_from_wire(message.terms),
        slots=tuple(message.slots),
        is_complete=message.is_complete,
        stop=stop_from_wire(message.stop) if message.HasField("stop") else None,
        ranks=tuple(map(_rank_from, message.ranks)),
        supervisors=tuple(map(_supervisor_from, message.supervisors)),
        excluded=tuple(ExcludedHost(excluded.host, excluded.reason, excluded.at) for excluded in message.excluded),
    )


def _rank(rank: RankStatus) -> pb.RankStatus:
    return pb.RankStatus(
        slot=rank.slot,
        incarnation=rank.incarnation,
        state=rank.state,
        rank=-1 if rank.rank is None else rank.rank,
        generation=rank.generation,
        step=rank.step,
        phase=rank.phase,
        beat_age_s=rank.beat_age_s,
        attempt=rank.attempt,
        host=rank.host,
        pid=rank.pid,
    )


def _rank_from(message: pb.RankStatus) -> RankStatus:
    return RankStatus(
        slot=message.slot,
        incarnation=message.incarnation,
        state=message.state,
        rank=message.rank if message.rank >= 0 else None,
        generation=check_number(message.generation, "generation") if message.HasField("generation") else None,
        step=check_number(message.step, "step"),
        phase=message.phase,
        beat_age_s=message.beat_age_s,
        attempt=message.attempt,
        host=message.host,
        pid=check_number(message.pid, "pid"),
    )


def _supervisor(supervisor: SupervisorStatus) -> pb.SupervisorStatus:
    return pb.SupervisorStatus(
        name=supervisor.name, host=supervisor.host, slots=supervisor.slots, is_connected=supervisor.is_connected
    )


def _supervisor_from(message: pb.SupervisorStatus) -> SupervisorStatus:
    return SupervisorStatus(message.name, message.host, tuple(message.slots), message.is_connected)


def _excluded(excluded: ExcludedHost) -> pb.ExcludedHost:
    return pb.ExcludedHost(host=excluded.host, reason=excluded.reason, at=excluded.at)


def _last(number: int, field: str) -> int:
    """The number of a generation, or -1: there was none."""
    return number if number == -1 else check_number(number, field)
