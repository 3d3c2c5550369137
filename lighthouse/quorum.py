"""Who is in a quorum, and when one forms.

On every event and every tick, in this order:

1. Candidates are the joined members (a joined member is alive and healthy: its call is open). If a member of the
   previous quorum asks to shrink, only that quorum's members stay candidates.
2. Fewer candidates than `min_replicas`, or than the smallest allowed size: no quorum, on no path.
3. Every member of the previous quorum is a candidate: form now.
4. Every healthy member has joined: form now.
5. Wait for the stragglers until `join_timeout_s` after the first join. Then they have missed it: they are not waited
   for, and not counted, until they join. A newcomer's join does not start that clock while members of the previous
   quorum are alive: they are in their step, and a long step is no fault.
6. Form earlier, `deadline_margin_s` before the first waiting call's deadline, if the candidates are more than half of
   the healthy ones: one straggler must not let everybody's call expire.

The quorum keeps its id while the same members (id, incarnation, addresses) form it and none reports a failed commit.
Nothing here is remembered of ids that have gone. An event that changes nothing costs O(1), a round O(n log n) once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lighthouse.admission import refusal, sent_away
from lighthouse.joins import Joins
from lighthouse.lineage import hand_out, tag_of
from lighthouse.roster import Handed, Member, Roster
from lighthouse.selection import choose, size_for
from protos.membership import Participant, Quorum
from protos.refusals import LighthouseError, Superseded


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """`first_quorum_id` must be above every id that this job was ever told."""

    min_replicas: int = 1
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    deadline_margin_s: float = 1.0
    allowed_sizes: frozenset[int] = frozenset()
    active: int | None = None
    allow_heterogeneous: bool = False
    max_replicas: int = 10_000
    first_quorum_id: int = 1


@dataclass(frozen=True, slots=True)
class Joined:
    """A call asks for a quorum; `call` is the driver's number of it, `deadline_at` the end of its time."""

    call: int
    participant: Participant
    deadline_at: float


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    replica_id: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The call ended without an answer: cancelled, its time over, or its connection closed."""

    call: int


@dataclass(frozen=True, slots=True)
class QuorumFormed:
    """`calls` are to be answered with `quorum`; `is_new` when its id is."""

    quorum: Quorum
    calls: tuple[int, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class JoinRefused:
    call: int
    error: LighthouseError


Event = Joined | HeartbeatReceived | Withdrawn
Effect = QuorumFormed | JoinRefused


class Verdict(StrEnum):
    """Why there is, or is not, a quorum."""

    NOBODY_ASKS = "nobody_asks"
    FORMED = "formed"
    READY = "ready"
    TOO_FEW_PARTICIPANTS = "too_few_participants"
    NO_ALLOWED_SIZE = "no_allowed_size"
    WAITING_FOR_MEMBERS = "waiting_for_members"
    WAITING_FOR_STRAGGLERS = "waiting_for_stragglers"


class QuorumMachine:
    """One job's quorum. Time is the caller's monotonic clock and never goes back."""

    def __init__(self, config: QuorumConfig) -> None:
        self.config = config
        self.roster = Roster(config.heartbeat_timeout_s)
        self.joins = Joins(config.heartbeat_timeout_s)
        self.quorum: Quorum | None = None
        self.formed_at = 0.0
        self.quorums_formed = 0
        self.rounds = 0
        self._next_id = config.first_quorum_id
        self._seen_id = 0
        self._composition: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self._previous: frozenset[str] = frozenset()
        self._absent = 0
        self._now = 0.0

    @property
    def is_quiet(self) -> bool:
        """Nobody is alive or remembered: the job can be forgotten."""
        return len(self.roster) == 0

    def is_participant(self, member: Member) -> bool:
        return member.in_quorum

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        self._pass_time(now)
        effects: list[Effect] = []
        match event:
            case Joined():
                effects += self._join(event, now)
            case HeartbeatReceived(replica_id, incarnation):
                self._beat(replica_id, incarnation, now)
            case Withdrawn(call):
                self._withdraw(call, now)
        return effects + self._form(now)

    def tick(self, now: float) -> Sequence[Effect]:
        self._pass_time(now)
        return self._form(now)

    def deadline(self, now: float) -> float | None:
        """When to call tick next; after `now`, once handle or tick was called for `now`."""
        moments = (self.roster.next_at(), self.missed_at(), self._cut_at() if self._is_majority() else None)
        return min((moment for moment in moments if moment is not None and moment > now), default=None)

    def verdict(self) -> Verdict:
        """Why there is, or is not, a quorum, as of the last event or tick."""
        candidates = self.joins.candidates
        if candidates == 0:
            return Verdict.FORMED if self.roster.working else Verdict.NOBODY_ASKS
        if candidates < self.config.min_replicas:
            return Verdict.TOO_FEW_PARTICIPANTS
        if size_for(candidates, self.config.allowed_sizes, self.config.active) < self.config.min_replicas:
            return Verdict.NO_ALLOWED_SIZE
        if (self._previous and self._absent == 0) or not self._has_stragglers():
            return Verdict.READY
        return Verdict.WAITING_FOR_MEMBERS if self.missed_at() is None else Verdict.WAITING_FOR_STRAGGLERS

    def stragglers(self) -> list[str]:
        """Healthy and not joined, sorted. O(n log n)."""
        return sorted(name for name in self.roster.healthy if name not in self.joins)

    # -- events

    def _join(self, event: Joined, now: float) -> list[Effect]:
        participant, config = event.participant, self.config
        error = refusal(
            participant, self.roster, max_replicas=config.max_replicas, allow_heterogeneous=config.allow_heterogeneous
        )
        if error is not None:
            return [JoinRefused(event.call, error)]
        effects = self._send_away(participant, now) + self._supersede(participant, now)
        member = self.roster.admit(participant, now)
        self._seen_id = max(self._seen_id, participant.seen_quorum_id, participant.tag_quorum_id or 0)
        if participant.replica_id in self._previous:
            self._absent -= 1
        self.joins.add(member, event.call, event.deadline_at, now)
        return effects

    def _send_away(self, participant: Participant, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for member, error in sent_away(participant, self.roster):
            if member.call is not None:
                effects.append(JoinRefused(member.call, error))
                self._withdraw(member.call, now)
            self.roster.remove(member)
        return effects

    def _supersede(self, participant: Participant, now: float) -> list[Effect]:
        old = self.roster.get(participant.replica_id)
        if old is None or old.call is None:
            return []
        call = old.call
        self._withdraw(call, now)
        return [JoinRefused(call, Superseded(f"{participant.replica_id} has asked again; its newer call is answered"))]

    def _beat(self, replica_id: str, incarnation: str, now: float) -> None:
        if self.roster.get(replica_id) is not None or len(self.roster) < self.config.max_replicas:
            self.roster.beat(replica_id, incarnation, now)

    def _withdraw(self, call: int, now: float) -> None:
        member = self.joins.withdraw(call, now)
        if member is not None and member.replica_id in self._previous:
            self._absent += 1

    # -- time

    def _pass_time(self, now: float) -> None:
        self._now = now
        self.roster.expire(now)

    def _note_missed(self) -> None:
        missed_at = self.missed_at()
        if missed_at is not None and self._now >= missed_at and self._is_enough():
            for name in self.stragglers():
                member = self.roster.get(name)
                if member is not None:
                    self.roster.miss(member)

    def missed_at(self) -> float | None:
        """When the present stragglers will have missed their join_timeout; None while nobody's wait counts."""
        if not self._has_stragglers() or not len(self.joins):
            return None
        clock = self.joins.members if self.roster.working else self.joins.anyone
        started_at = clock.running_since(self._now)
        return None if started_at is None else started_at + self.config.join_timeout_s

    def _cut_at(self) -> float | None:
        """When a waiting call must be answered, if a majority waits and a member's wait counts."""
        earliest = self.joins.earliest_deadline_at
        if earliest is None or self.missed_at() is None:
            return None
        return earliest - self.config.deadline_margin_s

    def _has_stragglers(self) -> bool:
        return len(self.roster.healthy) > len(self.joins)

    def _is_majority(self) -> bool:
        return 2 * self.joins.candidates > len(self.roster.healthy)

    def _is_enough(self) -> bool:
        candidates, config = self.joins.candidates, self.config
        return candidates >= config.min_replicas and (
            size_for(candidates, config.allowed_sizes, config.active) >= config.min_replicas
        )

    # -- forming

    def _form(self, now: float) -> list[Effect]:
        self._note_missed()
        cut_at = self._cut_at()
        is_cut = cut_at is not None and now >= cut_at and self._is_majority() and self._is_enough()
        if self.verdict() is not Verdict.READY and not is_cut:
            return []
        chosen = self._choose()
        tags = [tag_of(member.participant, member.handed) for member in chosen if member.participant]
        lineage = hand_out([member.participant for member in chosen if member.participant], tags)
        is_new = self._next_composition(chosen)
        for member in chosen:
            member.handed = Handed(self._next_id, lineage.max_step, lineage.tag_quorum_id)
            self.roster.see(member, now)
        self.quorum = Quorum(self._next_id, lineage.participants)
        self.rounds += 1
        if is_new:
            self.quorums_formed += 1
            self.formed_at = now
        self._previous = frozenset(member.replica_id for member in chosen)
        self._absent = len(chosen)
        self.roster.form(chosen)
        calls = self.joins.take(chosen, self._previous, now)
        return [QuorumFormed(self.quorum, calls, is_new)]

    def _choose(self) -> list[Member]:
        candidates = self.joins.list_candidates()
        size = size_for(len(candidates), self.config.allowed_sizes, self.config.active)
        by_id = {member.replica_id: member for member in candidates}
        participants = [member.participant for member in candidates if member.participant]
        chosen = [by_id[p.replica_id] for p in choose(participants, self._previous, size)]
        return sorted(chosen, key=lambda member: member.participant.wire_id if member.participant else "")

    def _next_composition(self, chosen: list[Member]) -> bool:
        """Move the id on if the membership is another one, a commit failed, or a member was told a higher id."""
        composition = tuple((member.birth, member.participant.identity) for member in chosen if member.participant)
        has_failed = any(member.participant is not None and member.participant.commit_failures > 0 for member in chosen)
        was_told_more = self._seen_id > (self.quorum.quorum_id if self.quorum else self._next_id - 1)
        if self.quorum is not None and composition == self._composition and not has_failed and not was_told_more:
            return False
        self._next_id = max(self._next_id + (self.quorum is not None), self._seen_id + 1)
        self._composition = composition
        return True
