"""A job's timeline, as its machine's effects, its roster and its members' steps fill it. No I/O.

Who heals: a participant below its quorum's highest step. It has healed once it works on a later step than that one, or
joins at that one at least. A group that catches up beside its steps works on later ones all the while: its join tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lighthouse.quorum.rules.events import Effect, QuorumFormed
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.rules.timeline import Timeline
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.status import TimelineKind
from lighthouse_protocol.rules.stall import StallVerdict


@dataclass(frozen=True, slots=True)
class _Heal:
    incarnation: str
    upto: int
    is_beside: bool


class History:
    def __init__(self, machine: QuorumMachine) -> None:
        self.timeline = Timeline()
        self._machine = machine
        self._heals: dict[str, _Heal] = {}

    def look(self, effects: Sequence[Effect], at_unix_s: float) -> None:
        """What the machine has just done."""
        notes = self._machine.roster.notes
        while notes:
            note = notes.popleft()
            if note.kind in (TimelineKind.LOST, TimelineKind.LEFT):
                self._heals.pop(note.replica_id, None)
            self.timeline.note(at_unix_s, note.kind, (note.replica_id,), note.text)
        for effect in effects:
            if isinstance(effect, QuorumFormed):
                self._formed(effect.quorum, at_unix_s, is_new=effect.is_new)

    def beat(self, replica_id: str, at_unix_s: float) -> None:
        """Its newest step is in the roster."""
        heal, member = self._heals.get(replica_id), self._machine.roster.get(replica_id)
        if heal is not None and member is not None and not heal.is_beside and member.step > heal.upto:
            self._healed(replica_id, member.step, at_unix_s)

    def stall(self, verdict: StallVerdict | None, at_unix_s: float) -> None:
        """What the log says: a verdict that is new, or None: something moves again."""
        if verdict is None:
            self.timeline.note(at_unix_s, TimelineKind.MOVES, (), "something moves again")
            return
        names = sorted({rank.replica_id for rank in verdict.behind})
        text = f"nothing moves for {verdict.still_s:.0f} s: {verdict.text}"
        self.timeline.note(at_unix_s, TimelineKind.STALL, names, text)

    def _formed(self, quorum: Quorum, at_unix_s: float, *, is_new: bool) -> None:
        max_step = max(member.step for member in quorum.participants)
        if is_new:
            names = [member.replica_id for member in quorum.participants]
            text = f"quorum {quorum.quorum_id}: {len(names)} participants at step {max_step}"
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
