"""Checks of what a lighthouse decides, by what it has received: S1, S3 and S6 as one lighthouse alone can break them.

A Ledger belongs to a place and outlives the lighthouse's processes. Nothing here computes what the product computes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lighthouse.job import events
from lighthouse.job.events import MemberLeft, MemberLost
from lighthouse.job.records import QuorumConfig, QuorumRecord
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import GroupReport, HoldState, QuorumOrder, QuorumPhase
from tests.simulation.checks import Checks
from tests.simulation.quorums.faults.lighthouse import LEASES_S
from tests.simulation.world import MAX_RATE, MIN_RATE, Violation, World

MAX_LEASE_S = max(LEASES_S)
ASKS_AGAIN_S = 1.2
HEARD_S = 1.2  # more than the longest interval between two heartbeats
TOLD = (HoldState.RECALLED, HoldState.JOINING, HoldState.LEAVING)
GOES_ON = (QuorumPhase.STANDING, QuorumPhase.RECALLED, QuorumPhase.RESUMED)
Member = tuple[str, str]


@dataclass(slots=True)
class Wait:
    """A group that waits for a quorum.

    The wait has ended at `until` unless the group asks again by then. With `shrinks`, the group is a member of the last
    quorum and admits only members.
    """

    since: float
    until: float = math.inf
    shrinks: bool = False


def member_of(participant: Participant) -> Member:
    return participant.replica_id, participant.incarnation


@dataclass(slots=True)
class Ledger:
    """What the lighthouse has promised. Times are the world's."""

    standing: Quorum | None = None
    """The newest durable quorum, if it stands."""
    leases: dict[Member, float] = field(default_factory=dict[Member, float])
    """When each member's lease ends at the latest, by all answers since."""
    renewed: dict[Member, float] = field(default_factory=dict[Member, float])
    """The same by the newest answer. A manager begins a quorum with it."""
    ids: set[int] = field(default_factory=set[int])
    """All ids of quorums."""
    last: frozenset[Member] = frozenset()
    """The members of the newest durable quorum."""
    is_blank: bool = False
    """True if the journal was lost and nothing was written since."""
    displaced: set[Member] = field(default_factory=set[Member])
    """Members of `last` that another process of their group has replaced."""
    unheard: dict[Member, float] = field(default_factory=dict[Member, float])
    """Members in the journal without a message since the start, and when the lease of each ends at the latest."""
    blind_until: float = 0.0
    """The same for unknown members, if the journal has no quorum."""
    returning_id: int = 0
    """The id of the quorum in the journal at the start."""

    def starts(self, record: QuorumRecord | None, lease_s: float, now: float) -> None:
        """Begin a process with the newest record of the journal."""
        until = now + max(lease_s, record.lease_s if record is not None else 0.0) / MAX_RATE
        quorum = record.quorum if record is not None else None
        stood = quorum.participants if record is not None and quorum is not None and record.stands else ()
        self.unheard = dict.fromkeys(map(member_of, stood), until)
        self.blind_until = until if quorum is None else 0.0
        self.returning_id = quorum.quorum_id if quorum is not None else 0

    def wrote(self, record: QuorumRecord) -> None:
        """Note a durable record. From now on, members may receive its quorum."""
        self.standing = record.quorum if record.stands else None
        if record.quorum_id not in self.ids:
            self.leases = dict(self.renewed)
        self.ids.add(record.quorum_id)
        self.last = frozenset(map(member_of, record.quorum.participants)) if record.quorum is not None else frozenset()
        self.displaced.clear()
        self.is_blank = False

    def asks(self, member: Member) -> None:
        self.displaced |= {other for other in self.last if other[0] == member[0] and other != member}

    def renew(self, member: Member, until: float) -> None:
        self.renewed[member] = until
        self.leases[member] = max(until, self.leases.get(member, 0.0))

    def lost_journal(self) -> None:
        """Forget all records. The lighthouse learns from its members again."""
        self.leases.clear()
        self.renewed.clear()
        self.last = frozenset()
        self.standing = None
        self.is_blank = True


class LighthouseChecks(Checks):
    """What one process of the lighthouse has received and sends."""

    def __init__(self, config: QuorumConfig, ledger: Ledger, world: World) -> None:
        self._config = config
        self._ledger = ledger
        self._world = world
        self._members: dict[int, Member] = {}
        self._waiting: dict[int, Participant] = {}
        self._granted: dict[tuple[int, Member], int] = {}
        self._left: set[tuple[int, Member]] = set()
        self._stopped: set[tuple[int, Member]] = set()
        self._phases: dict[int, QuorumPhase] = {}
        self._formed: events.QuorumFormed | None = None  # whose write, and what is said after it, may be under way
        self._waits: dict[Member, Wait] = {}
        self._heard: dict[Member, float] = {}  # when each connected member last sent a message
        self._unable: set[Member] = set()  # members that have reported that they cannot take part, until they join
        self.formed: Quorum | None = None  # the last one

    # -- what happens

    def before(self, event: events.QuorumEvent | None, now: float) -> None:
        if event is None:
            return
        if isinstance(event, events.ProcessPaused):  # it could answer nobody meanwhile
            self._waits.clear()
        self._check_patience()
        match event:
            case events.SessionOpened(session, hello):
                self._members[session] = member_of(hello.participant)
                self._ledger.unheard.pop(member_of(hello.participant), None)
                self._report(session, hello.levels)
            case events.SessionEnded(session):
                self._heard.pop(self._members.pop(session, ("", "")), None)
            case events.Left(session):
                self._heard.pop(self._members.get(session, ("", "")), None)
            case events.SessionHeartbeatReceived(session, beat):
                self._report(session, beat.levels)
            case events.Joined(call, participant, _, session):
                self._waiting[call] = participant
                self._ledger.unheard.pop(member_of(participant), None)
                self._ledger.asks(member_of(participant))
                self._unable.discard(member_of(participant))
                self._wait(participant)
                self._granted[participant.seen_quorum_id, member_of(participant)] = participant.requested_step - 1
                if session is not None:
                    self._change_ranks(session, member_of(participant))
            case events.Withdrawn(_, call):
                self._stop_waiting(call)
            case _:
                pass

    def _change_ranks(self, session: int, member: Member) -> None:
        """Move a session to another incarnation of its manager.

        A manager that has asked grants no more under its old quorum. Its newest lease counts for the next quorum, even
        while the last quorum is being written.
        """
        before = self._members.get(session, member)
        if before != member:
            self._ledger.leases.pop(before, None)
            self._ledger.renewed[member] = self._ledger.renewed.pop(before, 0.0)
        self._members[session] = member

    def _report(self, session: int, levels: GroupReport) -> None:
        held = levels.held
        if (member := self._members.get(session)) is not None:
            self._heard[member] = self._world.now
            if levels.down or levels.drains:
                self._unable.add(member)
        if held is not None and held.mode is not HoldState.STANDING and session in self._members:
            self._stopped.add((held.quorum_id, self._members[session]))
        if held is not None and held.mode in TOLD and session in self._members:
            key = held.quorum_id, self._members[session]
            self._granted[key] = held.granted
            if held.mode is HoldState.LEAVING:
                self._left.add(key)

    def effect(self, effect: events.QuorumEffect) -> None:
        match effect:
            case events.Welcomed(_, welcome):
                self._check_returned(welcome.order)
            case events.HeartbeatAnswered(session, _, order):
                self._check_returned(order)
                if session in self._members and self._renews(order):
                    self._ledger.renew(self._members[session], self._world.now + self._config.lease_s / MAX_RATE)
            case events.Ordered(order, _):
                self._check_returned(order)
                self._phases[order.quorum_id] = order.phase
                if order.phase is QuorumPhase.RESUMED:
                    self._check_resumed(order)
            case events.JoinRefused(call):
                self._stop_waiting(call)
            case events.QuorumResent(_, call):
                self._waits.pop(member_of(self._waiting.pop(call)), None)
            case MemberLost(replica_id) | MemberLeft(replica_id):
                for member in [member for member in self._waits if member[0] == replica_id]:
                    self._lets_in(self._waits.pop(member))
                self._heard = {member: at for member, at in self._heard.items() if member[0] != replica_id}
            case events.JobEnded():
                self.formed = None
            case events.QuorumFormed(quorum):
                self._check_holders(quorum)
                self.formed = quorum
                self._world.log("", _describe(effect))
                self._check_formed(effect)
            case _:
                pass

    def _renews(self, order: QuorumOrder | None) -> bool:
        """Return whether an answer renews the lease.

        An answer about a revoked quorum, or after its revoke, does not.
        """
        standing = self._ledger.standing
        phase = self._phases.get(standing.quorum_id if standing is not None else 0)
        return phase is not QuorumPhase.REVOKED if order is None else order.phase is not QuorumPhase.REVOKED

    def _wait(self, participant: Participant) -> None:
        """Begin or continue a wait. A group that asks again soon has waited all the time."""
        member, now = member_of(participant), self._world.now
        shrinks = participant.shrink_only and member in self._ledger.last
        wait = self._waits.pop(member, None)
        since = now if wait is None or now > wait.until else wait.since
        if wait is not None and not shrinks:
            self._lets_in(wait)
        self._waits[member] = Wait(since, shrinks=shrinks)

    def _lets_in(self, wait: Wait) -> None:
        """Restart the other waits if this one kept them out."""
        if wait.shrinks:
            for other in self._waits.values():
                other.since = self._world.now

    def _stop_waiting(self, call: int) -> None:
        participant = self._waiting.pop(call, None)
        if participant is not None and (wait := self._waits.get(member_of(participant))) is not None:
            wait.until = self._world.now + ASKS_AGAIN_S

    # -- what must hold

    def _check_patience(self) -> None:
        """Check that enough groups with a member of the last quorum wait no longer than for a straggler.

        The wait counts from when the lighthouse knows which groups are alive, and which leases have ended. While a
        member asks to shrink, only members count.
        """
        config, now = self._config, self._world.now
        lease_s = max(config.lease_s, MAX_LEASE_S)
        limit_s = (config.join_timeout_s + config.last_call_s + 2 * config.heartbeat_timeout_s + lease_s) / MIN_RATE + 3
        waits = {member: wait for member, wait in self._waits.items() if now <= wait.until}
        late = [member for member, wait in waits.items() if now > wait.since + limit_s]
        if any(wait.shrinks for wait in waits.values()):
            late = [member for member in late if member in self._ledger.last]
        if self._ledger.last.intersection(late) and largest_allowed(range(len(late) + 1), config):
            raise Violation(f"S5 {sorted(late)} have waited for a quorum for longer than {limit_s:.1f} s")

    def _check_returned(self, order: QuorumOrder | None) -> None:
        """Check that a restored quorum continues only with all members. It stands only if none of them has stopped."""
        standing = self._ledger.standing
        if order is None or standing is None or order.quorum_id != standing.quorum_id:
            return
        if order.phase in GOES_ON and self._ledger.unheard and order.quorum_id == self._ledger.returning_id:
            away = sorted(name for name, _ in self._ledger.unheard)
            raise Violation(f"S9 quorum {order.quorum_id} is {order.phase} before {away} are back")
        members = [member_of(p) for p in standing.participants]
        stopped = [member[0] for member in members if (order.quorum_id, member) in self._stopped]
        if order.phase is QuorumPhase.STANDING and stopped:
            raise Violation(f"S6 quorum {order.quorum_id} is told to stand, and {stopped} have stopped")

    def _check_resumed(self, order: QuorumOrder) -> None:
        """Check that a quorum resumes up to the highest granted step, or to the last step of a member that left."""
        standing = self._ledger.standing
        if standing is None or standing.quorum_id != order.quorum_id:
            return
        told = {p.replica_id: self._granted.get((order.quorum_id, member_of(p))) for p in standing.participants}
        silent = [name for name, granted in told.items() if granted is None]
        if silent:
            raise Violation(f"S6 quorum {order.quorum_id} is resumed up to {order.upto} before {silent} have answered")
        gone = [p.replica_id for p in standing.participants if (order.quorum_id, member_of(p)) in self._left]
        highest = max(granted for name, granted in told.items() if granted is not None and name in (gone or told))
        if order.upto != highest:
            text = f"S6 quorum {order.quorum_id} is resumed up to {order.upto}; granted: {told}; have left: {gone}"
            raise Violation(text)

    def _check_formed(self, effect: events.QuorumFormed) -> None:
        quorum, config = effect.quorum, self._config
        asked = {member_of(self._waiting[call]) for call in effect.calls if call in self._waiting}
        members = {member_of(participant) for participant in quorum.participants}
        where = f"quorum {quorum.quorum_id} of {sorted(members)}"
        if not members or members != asked or len(effect.calls) != len(quorum.participants):
            raise Violation(f"S1 {where} answers those who asked, {sorted(asked)}")
        if not is_allowed(len(members), config):
            raise Violation(f"S5 {where} has a size that the configuration forbids")
        if effect.stands and not effect.is_new:
            raise Violation(f"S1 {where} stands, and is formed once more")
        if effect.is_new and quorum.quorum_id in self._ledger.ids:
            raise Violation(f"S1 {where} has an id that was given out before")
        if not effect.is_new and any(self._waiting[call].commit_failures for call in effect.calls):
            raise Violation(f"S1 {where} keeps its id, though a commit has failed")
        last, here = self._ledger.last, self._ledger.last - self._ledger.displaced
        joined = [self._waiting[call] for call in effect.calls]
        shrinking = [p.replica_id for p in joined if p.shrink_only and member_of(p) in here]
        if shrinking and not members <= last:
            raise Violation(f"S6 {where} is not of the last one's members, {sorted(last)}; {shrinking} ask to shrink")
        self._check_record(effect, where)
        self._check_leases(members, where)
        self._formed = effect
        self._waits.clear()
        for call in effect.calls:
            self._waiting.pop(call, None)

    def _check_holders(self, quorum: Quorum) -> None:
        """Check that the quorum contains a member with the last one's state, unless all such members are absent."""
        last, now = self.formed, self._world.now
        if last is None:
            return
        before, start = {member_of(p) for p in last.participants}, max(p.step for p in last.participants)
        if any(member_of(p) in before and p.step >= start for p in quorum.participants):
            return
        waiting = {participant.replica_id for participant in self._waiting.values()}  # or another process of the group
        missing = [member for member in before - self._unable if member[0] not in waiting]
        if present := sorted(member for member in missing if now < self._heard.get(member, -math.inf) + HEARD_S):
            raise Violation(f"S14 quorum {quorum.quorum_id} forms without {present}, who may hold its state")

    def _check_record(self, effect: events.QuorumFormed, where: str) -> None:
        record = effect.record
        if effect.is_new and record is None:
            raise Violation(f"S1 {where} is new, and is not written down")
        if record is not None and (record.quorum, record.stands) != (effect.quorum, effect.stands):
            raise Violation(f"S1 {where}, and what is written down is another one: {record}")
        if record is not None and record.lease_s < self._config.lease_s:
            raise Violation(f"S3 {where} gives leases of {self._config.lease_s} s, and {record.lease_s} s are written")

    @property
    def _last_standing(self) -> Quorum | None:
        if self._formed is None or self._formed.quorum.quorum_id in self._ledger.ids:
            return self._ledger.standing
        return self._formed.quorum if self._formed.stands else None

    def _check_leases(self, members: set[Member], where: str) -> None:
        """Check that a quorum without a member of the last standing one waits for all its leases.

        A journal may be outdated, so a member without a message since the start may hold a later quorum.
        """
        standing, now = self._last_standing, self._world.now
        if (early_s := self._ledger.blind_until - now) > 0:
            raise Violation(f"S3 {where} forms {early_s:.3f} s too soon after a start with nothing written down")
        for (name, _), until in self._ledger.unheard.items():
            if now < until:
                other = f"a later quorum than the journal knew of, for {until - now:.3f} s more"
                raise Violation(f"S3 {where} forms, and {name}, not heard of since the start, may hold {other}")
        if standing is None or members & {member_of(p) for p in standing.participants}:
            return
        for participant in standing.participants:
            left_s = self._ledger.leases.get(member_of(participant), 0.0) - now
            if left_s > 0:
                other = f"quorum {standing.quorum_id}, whose member {participant.replica_id}"
                raise Violation(f"S3 {where} forms beside {other} may hold a lease for {left_s:.3f} s more")


def _describe(effect: events.QuorumFormed) -> str:
    """Describe a quorum for a trace."""
    members = " ".join(
        f"{p.replica_id}@{p.step}/{'apart' if p.ranks_disagree else p.tag_quorum_id}"
        for p in effect.quorum.participants
    )
    return f"{'standing ' * effect.stands}quorum {effect.quorum.quorum_id}: {members}"


def is_allowed(size: int, config: QuorumConfig) -> bool:
    if size < config.min_replicas or (config.active is not None and size > config.active):
        return False
    return not config.allowed_sizes or size in config.allowed_sizes


def largest_allowed(sizes: Iterable[int], config: QuorumConfig) -> int:
    """Return the largest of `sizes` that the configuration allows, or 0."""
    return max((size for size in sizes if is_allowed(size, config)), default=0)
