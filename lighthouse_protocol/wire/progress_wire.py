"""To and from the messages of progress.proto, with every check of a field. Readers raise InvalidRequest naming it."""

from lighthouse_protocol.constraints import check_age, check_count, check_quorum_id, check_short
from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.messages.progress import (
    MAX_DEPTH,
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMES,
    Collective,
    GroupView,
    OpenPhase,
    PhaseTime,
    RankName,
    RankView,
    Sample,
)
from lighthouse_protocol.pb.extensions import progress_pb2 as pb
from lighthouse_protocol.refusals import InvalidRequest

MAX_TIMES = MAX_NAMES + 2  # with what stands for all waits, and for all further names
MAX_SUMS = 4 * MAX_TIMES


def sample_to_wire(sample: Sample) -> pb.ProgressSample:
    return pb.ProgressSample(
        step=sample.step,
        phases=[
            pb.OpenPhase(name=phase.name, done=phase.done, total=phase.total, open_s=phase.open_s)
            for phase in sample.phases
        ],
        entered=[pb.PhaseCount(name=name, entered=times) for name, times in sample.entered],
        collective=None if sample.collective is None else _collective(sample.collective),
        waits_for=sample.waits_for,
        still_s=sample.still_s,
        is_first=sample.is_first,
        times=[
            pb.PhaseTime(name=time.name, visits=time.visits, seconds=time.seconds, longest_s=time.longest_s)
            for time in sample.times
        ],
    )


def sample_from_wire(message: pb.ProgressSample) -> Sample:
    _check_length(len(message.entered), MAX_NAMES, "entered")
    _check_length(len(message.times), MAX_TIMES, "times")
    if not 1 <= len(message.phases) <= MAX_DEPTH:
        raise InvalidRequest(f"has {len(message.phases)} entries; 1 to {MAX_DEPTH} are open at a time", field="phases")
    return Sample(
        step=check_count(message.step, "step"),
        phases=tuple(_phase_from(phase) for phase in message.phases),
        entered=tuple((_name(entry.name), check_count(entry.entered, "entered")) for entry in message.entered),
        collective=_collective_from(message.collective) if message.HasField("collective") else None,
        waits_for=check_short(message.waits_for, "waits_for", MAX_NAME_CHARS),
        still_s=check_age(message.still_s, "still_s"),
        is_first=message.is_first,
        times=tuple(_time_from(time) for time in message.times),
    )


def fitting_group_view(view: GroupView, max_bytes: int) -> pb.GroupProgress | None:
    """None where it would be bigger, even without what its ranks have entered before: above some thousand ranks."""
    message = group_view_to_wire(view)
    if message.ByteSize() <= max_bytes:
        return message
    for rank in message.ranks:
        del rank.sample.entered[:], rank.sample.times[:]
    return message if message.ByteSize() <= max_bytes else None


def group_view_to_wire(view: GroupView) -> pb.GroupProgress:
    return pb.GroupProgress(
        replica_id=view.replica_id,
        incarnation=view.incarnation,
        ranks=[
            pb.RankProgress(
                group_rank=rank.name.group_rank,
                sample=sample_to_wire(rank.sample),
                limit_s=rank.limit_s,
                beat_age_s=rank.beat_age_s,
                worker=rank.worker,
                host=rank.host,
                pid=rank.pid,
            )
            for rank in view.ranks
        ],
        seconds=[pb.PhaseSeconds(name=name, seconds=seconds) for name, seconds in view.seconds],
    )


def group_view_from_wire(message: pb.GroupProgress) -> GroupView:
    replica_id = check_name(message.replica_id)
    _check_length(len(message.ranks), MAX_GROUP_WORLD_SIZE, "ranks")
    _check_length(len(message.seconds), MAX_SUMS, "seconds")
    ranks = tuple(_rank_from(replica_id, rank) for rank in message.ranks)
    if len({rank.name for rank in ranks}) < len(ranks):
        raise InvalidRequest("names a rank twice", field="ranks")
    return GroupView(
        replica_id,
        check_short(message.incarnation, "incarnation"),
        ranks,
        tuple((_name(entry.name), check_age(entry.seconds, "seconds")) for entry in message.seconds),
    )


def _rank_from(replica_id: str, message: pb.RankProgress) -> RankView:
    if not 0 <= message.group_rank < MAX_GROUP_WORLD_SIZE:
        raise InvalidRequest(f"is {message.group_rank}; ranks are 0 to {MAX_GROUP_WORLD_SIZE - 1}", field="group_rank")
    return RankView(
        RankName(replica_id, message.group_rank),
        sample_from_wire(message.sample),
        limit_s=check_age(message.limit_s, "limit_s"),
        beat_age_s=check_age(message.beat_age_s, "beat_age_s"),
        worker=check_short(message.worker, "worker"),
        host=check_short(message.host, "host"),
        pid=check_count(message.pid, "pid"),
    )


def _collective(collective: Collective) -> pb.CollectiveMark:
    return pb.CollectiveMark(
        quorum_id=collective.quorum_id,
        number=collective.number,
        operation=collective.operation,
        shape=collective.shape,
        is_inside=collective.is_inside,
        within_group=collective.within_group,
        inner=collective.inner,
    )


def _collective_from(message: pb.CollectiveMark) -> Collective:
    return Collective(
        check_quorum_id(message.quorum_id),
        check_count(message.number, "number"),
        check_short(message.operation, "operation", MAX_NAME_CHARS),
        check_short(message.shape, "shape", MAX_LABEL_CHARS),
        message.is_inside,
        message.within_group,
        check_count(message.inner, "inner"),
    )


def _phase_from(message: pb.OpenPhase) -> OpenPhase:
    total = check_count(message.total, "total") if message.HasField("total") else None
    return OpenPhase(_name(message.name), check_count(message.done, "done"), total, check_age(message.open_s, "open_s"))


def _time_from(message: pb.PhaseTime) -> PhaseTime:
    return PhaseTime(
        _name(message.name),
        check_count(message.visits, "visits"),
        check_age(message.seconds, "seconds"),
        check_age(message.longest_s, "longest_s"),
    )


def _name(text: str) -> str:
    return check_short(text, "name", MAX_NAME_CHARS)


def _check_length(length: int, most: int, field: str) -> None:
    if length > most:
        raise InvalidRequest(f"has {length} entries; at most {most}", field=field)
