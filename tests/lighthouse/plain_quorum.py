"""The rules of lighthouse/job/forming.py once more, the dumb way: no counters, everything recounted from lists.

It is told what the machine was told and what it answered, and says what the answer should have been. Who is alive and
which record of an id is meant it takes from the machine's roster, which test_roster.py holds against its own rules.
"""

from dataclasses import dataclass, replace

from lighthouse.job.events import HeartbeatReceived, Joined, JoinRefused, QuorumEffect, QuorumEvent, QuorumFormed
from lighthouse.job.events import Withdrawn as WithdrawnEvent
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.lineage import LEFT_TO_ANOTHER
from lighthouse.job.records import Group
from lighthouse_protocol.messages.membership import Participant

NEVER = float("inf")


@dataclass
class Waiting:
    call: int
    participant: Participant
    deadline_at: float
    record: Group


@dataclass
class Spell:
    """Somebody asked from `since` to `until`."""

    replica_id: str
    since: float
    until: float = NEVER


class PlainQuorum:
    def __init__(self, machine: QuorumMachine) -> None:
        self.machine = machine
        self.config = machine.config
        self.waiting: list[Waiting] = []
        self.spells: list[Spell] = []
        self.missed: set[Group] = set()
        self.previous: dict[str, Group] = {}
        self.working = 0
        self.lost_at = NEVER
        self.composition: list[object] = []
        self.quorum_id = 0
        self.seen_id = 0
        self.names: dict[int, object] = {}

    # -- what happened

    def check(self, event: QuorumEvent | None, effects: list[QuorumEffect], now: float) -> None:
        """Raises AssertionError where `effects` are not what `event` (None: a tick) should have brought about."""
        rest = list(effects)
        while rest and isinstance(rest[0], JoinRefused):
            self._end(rest.pop(0).call, now, event)
        match event:
            case Joined() if not any(isinstance(e, JoinRefused) and e.call == event.call for e in effects):
                self._join(event, now)
            case WithdrawnEvent(_, call) if self._find(call) is not None:
                self._end(call, now, None)
            case Joined() | HeartbeatReceived() | WithdrawnEvent() | None:
                pass
        assert not any(isinstance(e, JoinRefused) for e in rest), "refusals come first"
        if len(self._members_alive()) < self.working:
            self.lost_at = now
        expected = self._form(now)
        assert [self._shown(e) for e in rest] == expected
        for effect in rest:
            assert isinstance(effect, QuorumFormed)
            self._check_participants(effect)
            self._formed(effect, now)
        self.working = len(self._members_alive())
        self._check_deadline(now)

    def _join(self, event: Joined, now: float) -> None:
        name = event.participant.replica_id
        assert name not in [w.participant.replica_id for w in self.waiting], "one call of an id waits"
        member = self.machine.job.groups.get(name)
        assert member is not None
        self.missed.discard(member)
        self.waiting.append(Waiting(event.call, event.participant, event.deadline_at, member))
        self.spells.append(Spell(name, now))
        self.seen_id = max(self.seen_id, event.participant.seen_quorum_id, event.participant.tag_quorum_id or 0)

    def _end(self, call: int, now: float, refused_join: QuorumEvent | None) -> None:
        if isinstance(refused_join, Joined) and refused_join.call == call:
            return
        waiting = self._find(call)
        assert waiting is not None, f"call {call} was answered and did not wait"
        self.waiting.remove(waiting)
        for spell in self.spells:
            if spell.replica_id == waiting.participant.replica_id and spell.until == NEVER:
                spell.until = now

    def _find(self, call: int) -> Waiting | None:
        return next((w for w in self.waiting if w.call == call), None)

    # -- what should follow

    def _form(self, now: float) -> list[tuple[object, ...]]:
        missed_at = self.missed_at(now)
        if missed_at <= now and self._size():
            self.missed |= {self._record(name) for name in self.stragglers()}
        if not self._size():
            return []
        is_fast = bool(self.previous) and self.previous.keys() <= self._joined()
        is_cut = self.cut_at(now) <= now and 2 * len(self._candidates()) > len(self.healthy())
        if not is_fast and self.stragglers() and not is_cut:
            return []
        if now < self.last_call_until() and not is_cut:
            return []
        chosen = self._choose()
        composition = [(w.record, w.participant.identity) for w in chosen]
        is_new = (
            composition != self.composition
            or any(w.participant.commit_failures > 0 for w in chosen)
            or self.seen_id > self.quorum_id
        )
        if is_new:
            first = self.config.first_quorum_id if not self.quorum_id else self.quorum_id + 1
            self.quorum_id = first if self.seen_id < first else self.seen_id + LEFT_TO_ANOTHER
            self.composition = composition
        return [(self.quorum_id, tuple(w.call for w in chosen), tuple(w.participant.wire_id for w in chosen), is_new)]

    def _shown(self, effect: QuorumEffect) -> tuple[object, ...]:
        assert isinstance(effect, QuorumFormed)
        quorum = effect.quorum
        return quorum.quorum_id, effect.calls, tuple(p.wire_id for p in quorum.participants), effect.is_new

    def _check_participants(self, effect: QuorumFormed) -> None:
        participants, config = effect.quorum.participants, self.config
        asked = [w.participant for call in effect.calls if (w := self._find(call))]
        assert len(asked) == len(participants) >= config.min_replicas
        assert not config.allowed_sizes or len(participants) in config.allowed_sizes
        assert config.active is None or len(participants) <= config.active
        max_step = max(p.step for p in participants)
        for one, other in zip(asked, participants, strict=True):
            assert replace(one, step=other.step) == other
            assert other.step == one.step or other.step == max(0, max_step - 1) < max(one.step, 1)
        sizes = {p.group_world_size for p in participants} - {0}
        assert config.allow_heterogeneous or len(sizes) <= 1
        composition = [(w.record, w.participant.identity) for call in effect.calls if (w := self._find(call))]
        known = self.names.setdefault(effect.quorum.quorum_id, composition)
        assert known == composition, "one id, two compositions"
        assert effect.quorum.quorum_id == max(self.names), "the id went back"

    def _formed(self, effect: QuorumFormed, now: float) -> None:
        answered = set(effect.calls)
        self.lost_at = NEVER
        self.previous = {w.participant.replica_id: w.record for w in self.waiting if w.call in answered}
        self.waiting = [w for w in self.waiting if w.call not in answered]
        self.spells = [Spell(w.participant.replica_id, now) for w in self.waiting]

    # -- recounts

    def healthy(self) -> set[str]:
        return {m.replica_id for m in self.machine.job.groups.values() if m.is_alive and m not in self.missed}

    def stragglers(self) -> list[str]:
        return sorted(self.healthy() - self._joined())

    def missed_at(self, now: float) -> float:
        if not self.stragglers() or not self.waiting:
            return NEVER
        spells = [s for s in self.spells if not self._members_alive() or s.replica_id in self.previous]
        return self._clock(spells, now) + self.config.join_timeout_s

    def cut_at(self, now: float) -> float:
        if self.missed_at(now) == NEVER:
            return NEVER
        return self._answer_by()

    def _answer_by(self) -> float:
        calls = [w for w in self.waiting if not self._members_alive() or w.participant.replica_id in self.previous]
        return min((w.deadline_at for w in calls), default=NEVER) - self.config.deadline_margin_s

    def last_call_until(self) -> float:
        """Until then nobody takes the place of a member that was lost."""
        members = [w for w in self.waiting if w.participant.replica_id in self.previous]
        if self.config.active is None or self.lost_at == NEVER or len(members) >= self._size():
            return -NEVER
        return min(self.lost_at + self.config.last_call_s, self._answer_by())

    def _members_alive(self) -> set[str]:
        return {name for name in self.healthy() if self.previous.get(name) == self._record(name)}

    def _clock(self, spells: list[Spell], now: float) -> float:
        """Since when somebody asks, gaps of at most heartbeat_timeout not counted."""
        grace = self.config.heartbeat_timeout_s
        start, until = NEVER, -NEVER
        for spell in sorted(spells, key=lambda s: s.since):
            if spell.since - until > grace:
                start = spell.since
            until = max(until, spell.until)
        return NEVER if now - until > grace else start

    def _joined(self) -> set[str]:
        return {w.participant.replica_id for w in self.waiting}

    def _record(self, name: str) -> Group:
        member = self.machine.job.groups.get(name)
        assert member is not None
        return member

    def _candidates(self) -> list[Waiting]:
        members = [w for w in self.waiting if self.previous.get(w.participant.replica_id) == w.record]
        return members if any(w.participant.shrink_only for w in members) else self.waiting

    def _size(self) -> int:
        """How many a quorum may have now; 0: none may form."""
        most = len(self._candidates())
        if self.config.active is not None:
            most = min(most, self.config.active)
        if self.config.allowed_sizes:
            most = max((n for n in self.config.allowed_sizes if n <= most), default=0)
        return most if most >= self.config.min_replicas else 0

    def _choose(self) -> list[Waiting]:
        members = [w for w in self._candidates() if w.participant.replica_id in self.previous]
        others = [w for w in self._candidates() if w.participant.replica_id not in self.previous]
        chosen = (sorted(members, key=lambda w: -w.participant.step) + others)[: self._size()]
        return sorted(chosen, key=lambda w: w.participant.wire_id)

    def _check_deadline(self, now: float) -> None:
        due = self.machine.deadline(now)
        assert due is None or due > now
        moments = (self.missed_at(now), self.cut_at(now), self.last_call_until())
        first = min((at for at in moments if at > now), default=NEVER)
        if first != NEVER and self._size() and 2 * len(self._candidates()) > len(self.healthy()):
            assert due is not None
            assert due <= first, "the machine would sleep through it"
