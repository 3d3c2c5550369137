"""The one snapshot that log, CLI, page and metrics show."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lighthouse.members.rules.rank_grid import Grid, grid_of
from lighthouse.members.rules.roster import Member
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.verdict import Verdict
from lighthouse_protocol.messages.incident import IncidentSummary
from lighthouse_protocol.messages.progress import DataUse
from lighthouse_protocol.messages.status import (
    HealStatus,
    JobStatus,
    MemberState,
    MemberStatus,
    RankPlace,
    TimelineEntry,
)
from lighthouse_protocol.rules.proof import short_name
from lighthouse_protocol.rules.stall import StallVerdict

NAMES_SHOWN = 8


def job_status(
    job: str,
    machine: QuorumMachine,
    now: float,
    stall: StallVerdict | None = None,
    ranks: tuple[RankPlace, ...] = (),
    timeline: tuple[TimelineEntry, ...] = (),
    incidents: tuple[IncidentSummary, ...] = (),
    heals: Mapping[str, HealStatus] = MappingProxyType({}),
    data: DataUse | None = None,
    steps_per_s: float | None = None,
) -> JobStatus:
    """`heals`: of the groups that heal. O(n log n): for a person or a scrape, never for a round."""
    current = machine.current
    members = sorted(machine.roster, key=lambda member: member.replica_id)
    return JobStatus(
        job=job,
        quorum_id=machine.quorum.quorum_id if machine.quorum else 0,
        quorum_age_s=now - current.formed_at if current.formed_at is not None else 0.0,
        verdict=machine.verdict().value,
        explanation=explain(machine, now, steps_per_s),
        quorums_formed=current.changes,
        rounds=current.rounds,
        members=tuple(_member_status(m, machine, now, heals.get(m.replica_id)) for m in members),
        phase=machine.standing.phase.value,
        sessions=machine.presence.sessions,
        recalls=machine.standing.recalls,
        revokes=machine.standing.revokes,
        ranks=ranks,
        stall=stall.text if stall is not None else "",
        stall_s=stall.still_s if stall is not None else 0.0,
        timeline=timeline,
        incidents=incidents,
        data=data,
    )


def explain(machine: QuorumMachine, now: float, steps_per_s: float | None = None) -> str:
    """The verdict with its numbers, in words."""
    held = machine.presence.silence.braked_for if now < machine.braked_until else ""
    silent = machine.presence.silent(now)
    overdue = f"no heartbeat in time from {_shown(silent)}" if silent else ""
    grid = grid_of(machine.roster)
    starting = _starting(machine, grid)
    are_all_starting = machine.verdict() is Verdict.NO_JOINS and all(
        member.is_starting for member in machine.roster if member.is_alive
    )
    why = "" if starting and are_all_starting else _explain(machine, now, steps_per_s)
    return "; ".join(filter(None, (why, held, overdue, starting, grid.explain())))


def awaited(machine: QuorumMachine) -> str:
    """What requests for a quorum wait for, without a number that changes by itself; empty: nothing."""
    if not (what := _awaited(machine)):
        return ""
    grid = grid_of(machine.roster)
    return "; ".join(filter(None, (what, _starting(machine, grid), grid.explain())))


def _awaited(machine: QuorumMachine) -> str:
    joined, config = machine.joins.candidates, machine.config
    names = _shown(sorted(member.replica_id for member in machine.joins.list_candidates()))
    match machine.verdict():
        case Verdict.TOO_FEW_PARTICIPANTS:
            more = config.min_replicas - joined
            groups = f"{more} more replica group{'s' if more > 1 else ''}"
            return f"{groups}: at least {config.min_replicas} are needed (--min-replicas), joined: {names}"
        case Verdict.NO_ALLOWED_SIZE:
            return f"more replica groups: allowed sizes are {_sizes(config)}, joined: {names}"
        case Verdict.WAITING_FOR_MEMBERS:
            return f"{_names(machine)}, the members of the quorum, to finish their step"
        case Verdict.WAITING_FOR_STRAGGLERS:
            return f"{_names(machine)}, at most {config.join_timeout_s:g} s (--join-timeout)"
        case Verdict.WAITING_FOR_RECALL:
            return "the members of the quorum to report their step"
        case Verdict.WAITING_FOR_RECONNECT:
            return "the members of the quorum to reconnect after the restart of the lighthouse"
        case Verdict.WAITING_FOR_LEASES:
            return "the last quorum's leases to expire: none of its members has joined, or the lighthouse has restarted"
        case Verdict.WAITING_FOR_LOST_MEMBER:
            return "a lost member to return before a spare replaces it (--spare-promotion-delay)"
        case Verdict.NO_JOINS | Verdict.FORMED | Verdict.READY:
            return ""


def _starting(machine: QuorumMachine, grid: Grid) -> str:
    """Groups of which no rank is here yet; of the others the grid says which are missing."""
    begun = {group.replica_id for group in grid.groups}
    names = [m.replica_id for m in machine.roster if m.is_alive and m.is_starting and m.replica_id not in begun]
    return f"starting: {_shown(sorted(names))}" if names else ""


def _explain(machine: QuorumMachine, now: float, steps_per_s: float | None) -> str:
    joined, healthy, config = machine.joins.candidates, len(machine.roster.healthy), machine.config
    match machine.verdict():
        case Verdict.NO_JOINS:
            end = machine.job_end.step
            return f"waiting for a replica group to join; {healthy} alive" if end is None else f"ended at step {end}"
        case Verdict.FORMED:
            return _progress(machine, steps_per_s)
        case Verdict.TOO_FEW_PARTICIPANTS:
            return f"waiting for replica groups: {joined} of at least {config.min_replicas} joined (--min-replicas)"
        case Verdict.NO_ALLOWED_SIZE:
            return f"waiting for replica groups: {joined} joined, allowed sizes are {_sizes(config)}"
        case Verdict.WAITING_FOR_MEMBERS:
            return f"waiting for {_names(machine)} to finish their step; {joined} joined"
        case Verdict.WAITING_FOR_STRAGGLERS:
            left = max(0.0, (machine.missed_at() or now) - now)
            return f"waiting for {_names(machine)}, {left:.0f} s more at most; {joined} of {healthy} joined"
        case Verdict.WAITING_FOR_RECALL:
            return f"waiting for the quorum's members to report their step: {machine.standing.reason}; {joined} joined"
        case Verdict.WAITING_FOR_RECONNECT:
            left = (machine.standing.returns_until() or now) - now
            return f"waiting for the quorum to reconnect after a restart, {left:.1f} s more at most; {joined} joined"
        case Verdict.WAITING_FOR_LEASES:
            left = machine.leases_until() - now
            away = _shown(sorted(machine.standing.unheard(now)))
            what = f"{away} to return after a restart" if away else "the last quorum's leases to expire"
            return f"waiting for {what}, {left:.1f} s more at most; {joined} joined"
        case Verdict.WAITING_FOR_LOST_MEMBER:
            left = (machine.last_call_until or now) - now
            return f"waiting {left:.1f} s more for a lost member before a spare replaces it; {joined} joined"
        case Verdict.READY:
            return f"forming a quorum; {joined} joined"


def _progress(machine: QuorumMachine, steps_per_s: float | None) -> str:
    """Describe a job with a quorum: how fast it trains, and how many of its groups take part."""
    size = len(machine.quorum.participants) if machine.quorum else 0
    if not machine.roster.healthy:
        return f"no group is alive; {size} took part"
    training = sum(member.is_alive for member in machine.roster.participants())
    rate = f"{steps_per_s:.3g} steps/s, " if steps_per_s else ""
    return f"{rate}{training} of {max(size, len(machine.roster))} groups"


def _sizes(config: QuorumConfig) -> str:
    return ", ".join(str(size) for size in sorted(config.allowed_sizes)) or f"at most {config.active}"


def _names(machine: QuorumMachine) -> str:
    return _shown(machine.stragglers())


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _member_status(member: Member, machine: QuorumMachine, now: float, heal: HealStatus | None) -> MemberStatus:
    participant, state = member.participant, _state(member, machine)
    return MemberStatus(
        replica_id=member.replica_id,
        start=short_name(member.incarnation),
        state=MemberState.HEALING if heal is not None and state is MemberState.PARTICIPANT else state,
        is_participant=machine.current.has(member),
        step=member.step,
        world_size=participant.group_world_size if participant else 0,
        heartbeat_age_s=0.0 if member.call is not None and member.session is None else max(0.0, now - member.seen_at),
        commit_failures=participant.commit_failures if participant else 0,
        address=participant.address if participant else "",
        store_address=participant.store_address if participant else "",
        heal=heal,
    )


def _state(member: Member, machine: QuorumMachine) -> MemberState:
    if not member.is_alive:
        return MemberState.EXPIRED
    if member.call is not None:
        return MemberState.JOINED
    if member.is_starting:
        return MemberState.STARTING
    if member.down:
        return MemberState.DOWN
    if member.has_missed:
        return MemberState.TIMED_OUT
    if len(machine.joins) and machine.missed_at() is not None:
        return MemberState.STRAGGLER
    return MemberState.PARTICIPANT if machine.current.has(member) else MemberState.IDLE
