"""What happened to a job, for a person: the newest entries, filled from its machine's effects and its members' steps.

Several replica groups to which the same happens in the same moment are one entry: a thousand that come fill no page.

A participant below its quorum's highest step heals. It has healed once it works on a later step than that one, or
joins at that one at least. A group that catches up beside its steps works on later ones all the while: its join tells.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lighthouse.members.rules.events import MemberBack, MemberDraining, MemberJoined, MemberLeft, MemberLost
from lighthouse.members.rules.roster import Roster
from lighthouse.quorum.rules.events import Effect, QuorumFormed
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.status import TimelineEntry, TimelineKind
from lighthouse_protocol.rules.stall import StallVerdict

ENTRIES_KEPT = 500
NAMES = 16
TOGETHER_S = 1.0


class Timeline:
    def __init__(self, limit: int = ENTRIES_KEPT) -> None:
        self._entries: deque[TimelineEntry] = deque(maxlen=limit)

    def note(self, at_unix_s: float, kind: TimelineKind, replica_ids: Sequence[str], text: str = "") -> None:
        """It joins the newest entry if that says the same of others, a moment ago. Of many names the first are kept."""
        newest = self._entries[-1] if self._entries else None
        if newest is None or not _is_same(newest, at_unix_s, kind, text) or not replica_ids:
            names = tuple(replica_ids)
            self._entries.append(TimelineEntry(at_unix_s, kind, names[:NAMES], len(names[NAMES:]), text))
            return
        names = (*newest.replica_ids, *replica_ids)
        self._entries[-1] = replace(newest, replica_ids=names[:NAMES], more=newest.more + len(names[NAMES:]))

    @property
    def entries(self) -> tuple[TimelineEntry, ...]:
        """The newest last."""
        return tuple(self._entries)


def _is_same(newest: TimelineEntry, at_unix_s: float, kind: TimelineKind, text: str) -> bool:
    is_now = abs(at_unix_s - newest.at_unix_s) <= TOGETHER_S
    return is_now and (newest.kind, newest.text) == (kind, text) and bool(newest.replica_ids)


@dataclass(frozen=True, slots=True)
class _Heal:
    incarnation: str
    upto: int
    is_beside: bool


class History:
    def __init__(self, roster: Roster) -> None:
        self.timeline = Timeline()
        self._roster = roster
        self._heals: dict[str, _Heal] = {}

    def read(self, effects: Sequence[Effect], at_unix_s: float) -> None:
        """What the machine has just done."""
        for effect in effects:
            match effect:
                case MemberJoined(replica_id):
                    self.timeline.note(at_unix_s, TimelineKind.JOINED, (replica_id,))
                case MemberBack(replica_id, text):
                    self.timeline.note(at_unix_s, TimelineKind.JOINED, (replica_id,), text)
                case MemberLost(replica_id, _, reason):
                    self._heals.pop(replica_id, None)
                    self.timeline.note(at_unix_s, TimelineKind.LOST, (replica_id,), reason)
                case MemberLeft(replica_id):
                    self._heals.pop(replica_id, None)
                    self.timeline.note(at_unix_s, TimelineKind.LEFT, (replica_id,))
                case MemberDraining(replica_id):
                    self.timeline.note(at_unix_s, TimelineKind.DRAINED, (replica_id,))
                case QuorumFormed():
                    self._formed(effect.quorum, at_unix_s, is_new=effect.is_new)
                case _:
                    pass

    def beat(self, replica_id: str, at_unix_s: float) -> None:
        """Its newest step is in the roster."""
        heal, member = self._heals.get(replica_id), self._roster.get(replica_id)
        if heal is not None and member is not None and not heal.is_beside and member.step > heal.upto:
            self._healed(replica_id, member.step, at_unix_s)

    def stall(self, verdict: StallVerdict | None, at_unix_s: float) -> None:
        """What the log says: a verdict that is new, or None: something moves again."""
        if verdict is None:
            self.timeline.note(at_unix_s, TimelineKind.MOVES, (), "progress resumed")
            return
        names = sorted({rank.replica_id for rank in verdict.behind})
        text = f"nothing has moved for {verdict.still_s:.0f} s: {verdict.text}"
        self.timeline.note(at_unix_s, TimelineKind.STALL, names, text)

    def _formed(self, quorum: Quorum, at_unix_s: float, *, is_new: bool) -> None:
        max_step = max(member.step for member in quorum.participants)
        if is_new:
            names = [member.replica_id for member in quorum.participants]
            noun = "participant" if len(names) == 1 else "participants"
            text = f"quorum {quorum.quorum_id}: {len(names)} {noun} at step {max_step}"
            self.timeline.note(at_unix_s, TimelineKind.QUORUM, names, text)
        for member in quorum.participants:
            name, heal = member.replica_id, self._heals.get(member.replica_id)
            if heal is not None and (member.incarnation != heal.incarnation or member.step >= heal.upto):
                self._healed(name, member.step, at_unix_s, is_it=member.incarnation == heal.incarnation)
            if member.step < max_step and name not in self._heals:
                self._heals[name] = _Heal(member.incarnation, max_step, member.catch_up)
                text = f"from step {member.step} to {max_step}"
                self.timeline.note(at_unix_s, TimelineKind.HEALING, (name,), text)

    def _healed(self, replica_id: str, step: int, at_unix_s: float, *, is_it: bool = True) -> None:
        """`is_it`: not another incarnation, which begins anew."""
        del self._heals[replica_id]
        if is_it:
            self.timeline.note(at_unix_s, TimelineKind.HEALED, (replica_id,), f"at step {step}")
