"""The machine's counters and indices against a count of what they count."""

from collections import Counter

from lighthouse.job.forming import QuorumMachine
from lighthouse.job.records import Kind, is_loopback
from lighthouse_protocol.messages.session import QuorumPhase


def recount(machine: QuorumMachine, now: float) -> None:
    """Raises AssertionError where a number that is kept is not the number that is."""
    joins, job = machine.joins, machine.job
    members = list(job.groups.values())
    alive = [m for m in members if m.is_alive]
    is_first = not job.counts[Kind.CONNECTED] or not job.members
    waited_for = [m for m in alive if is_first or m.participant is not None or m.is_participant]
    healthy = [m for m in waited_for if not m.has_missed and not m.down]
    assert [m for m in members if m.is_healthy] == healthy
    expected = {
        Kind.HEALTHY: len(healthy),
        Kind.WORKING: sum(m.is_participant for m in healthy),
        Kind.REPORTED: sum(m.participant is None for m in members),
        Kind.CONNECTED: sum(m.session is not None for m in members),
        Kind.DRAINING: sum(m.drains and m.is_participant for m in members),
        Kind.LOOPBACK: sum(bool(m.is_loopback) for m in alive),
        Kind.ROUTABLE: sum(m.is_loopback is False for m in alive),
        **Counter(m.participant.group_world_size for m in alive if m.participant and m.participant.group_world_size),
    }
    assert +job.counts == +Counter(expected)
    for m in members:
        assert m.is_loopback == (is_loopback(m.participant) if m.participant else None)

    joined = list(joins)
    assert len(joins) == len(joined)
    assert sorted(m.call for m in joined) == [m.call for m in joined]
    assert {m.replica_id for m in joined} == {m.replica_id for m in members if m.call is not None}
    assert all(job.groups.get(m.replica_id) is m and m.is_alive and not m.has_missed and not m.down for m in joined)
    assert joins.anyone.deadline_at == min((m.deadline_at for m in joined), default=None)
    of_members = (m.deadline_at for m in joined if m.replica_id in job.members)
    assert joins.members.deadline_at == min(of_members, default=None)
    assert joins.anyone.asking == len(joined)
    assert joins.members.asking == sum(m.replica_id in job.members for m in joined)
    assert joins.has_all_members == (bool(job.members.keys()) and job.members.keys() <= {m.replica_id for m in joined})
    assert {m.replica_id for m in members if m.is_participant} <= job.members.keys()

    tracked = {id(entry[2]) for entry in job._due}
    assert all(id(m) in tracked for m in members), "nobody would notice its death"
    assert all(at > now for at, _, _ in job._due)

    recount_sessions(machine)


def recount_sessions(machine: QuorumMachine) -> None:
    presence, standing, groups = machine.presence, machine.standing, machine.job.groups.values()
    connected = {m.session: m for m in groups if m.is_connected}
    assert presence.sessions == connected
    assert all(m.is_alive for m in connected.values())
    assert all(m.session is not None for m in groups if m.drains)
    assert not set(presence._leaving) & set(presence.sessions)
    holders = {name: holder.incarnation for name, holder in standing.leases.items()}
    quorum = standing.quorum
    assert holders == ({p.replica_id: p.incarnation for p in quorum.participants} if quorum else {})
    assert (standing.phase is QuorumPhase.NONE) <= (quorum is None)
    assert standing.upto == 0 or standing.phase in (QuorumPhase.RESUMED, QuorumPhase.REVOKED)
