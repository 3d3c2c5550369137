"""The standing quorum, whose managers start steps without asking the lighthouse each time.

A manager *grants* a step when it lets its ranks start that step. It may do so until its *lease* expires, which each
answered heartbeat renews. The lighthouse sends three orders about the quorum. A *recall* stops the granting, a *resume*
allows it up to a last step, and a *revoke* ends the quorum at once.

1. The quorum is STANDING while no group asks to join or leave. When a group does, the lighthouse recalls the quorum
   (RECALLED), and each member reports the highest step that it has granted. When all have reported, the lighthouse
   resumes them (RESUMED) up to m, the highest of these steps. So all members run the same steps, and no step is lost.
   After step m they join the next quorum.
2. The quorum is REVOKED if a member is lost, joins after a failed commit, or joins for step m or an earlier one. The
   members then abort the running step, vote on it and join.
3. A member whose script ended after its last committed step has left, which is not a loss. m is then at most that step.
   If another member has granted a later step, it cannot complete that step, and the quorum is revoked. This happens
   once the other members have completed step m, because data of that step may still be in transit. If no member
   has granted a later step, the quorum ends when all have completed step m.
4. The next quorum may form at once if it includes a member (same replica_id and incarnation): that member no longer
   grants, and the others cannot complete a step without it. Otherwise it must wait until the leases of all members
   expire. A member whose manager joined with restarted ranks has no lease. After a restart of the lighthouse, the next
   quorum also waits until each member has reported or its lease has expired: the journal may be outdated, and a missing
   member may hold a later quorum.
5. After a restart of the lighthouse the quorum is RETURNING: its members continue to train while they reconnect. When
   all have reconnected, the quorum is STANDING again. It is revoked instead if a member reports it as revoked or does
   not reconnect within the lease, and recalled if a member reports it as recalled or resumed, or joins. Until then no
   quorum forms. Many members may need more than a lease to reconnect, so the wait is extended by up to another lease
   while members are still arriving. After a quorum that did not stand, the next one forms when all members have joined,
   or after a lease, so that a group that connects first does not form it alone.
6. A member that never received the quorum, because its connection broke or the lighthouse died, joins again with the
   same state. The lighthouse then resends the quorum. It also resends one that does not stand, as long as no other
   member has joined again: the others may be waiting for this member in a collective.

Every message from a member repeats the quorum state that the member holds, so no single message is essential.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lighthouse.job.records import Group, JoinState, Lease, QuorumRecord
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.session import HeldQuorum, HoldState, QuorumOrder, QuorumPhase

STILL_COME_S = 1.0
"""Seconds to wait for the next member after one has reconnected."""


@dataclass(frozen=True, slots=True)
class ResendQuorum:
    """Instruction to resend the quorum to the joining member, and then to send `order`, if any, to all members."""

    order: QuorumOrder | None = None


Outcome = QuorumOrder | ResendQuorum | None
"""An order for all members, a quorum to resend to one member, or None."""


class Standing:
    """Current or most recent standing quorum of a job, with its phase and its members' leases.

    The managers of a standing quorum start steps without asking the lighthouse. Times are from the monotonic clock.
    """

    def __init__(self) -> None:
        self.quorum: Quorum | None = None
        """The current or most recent standing quorum. None if its members are unknown."""
        self.phase = QuorumPhase.NONE
        self.upto = 0
        self.reason = ""
        self.lost = ""  # member that caused the revoke, if known
        self.recalls = 0
        self.revokes = 0
        self.is_unheld = False
        """True if the phase is RETURNING and the last quorum was not a standing one, so no member has a lease."""
        self.leases: dict[str, Lease] = {}
        """Leases of the quorum's members, by replica_id."""
        self._returns_until = self._returns_at_most = 0.0
        self._confirmed_at = -math.inf
        self._needs_recall = self._has_leaver = False
        self._all_reported_at = 0.0  # when unreported members no longer have a lease
        self._awaited = 0  # number of members that the current phase waits for
        self._free_at: float | None = 0.0  # when all leases have expired; None if not computed

    # -- queries

    @property
    def blocks_forming(self) -> bool:
        """True while this quorum prevents a new one from forming."""
        return self.phase in (QuorumPhase.STANDING, QuorumPhase.RECALLED, QuorumPhase.RETURNING)

    @property
    def members_at_work(self) -> list[str]:
        """Members that may still run a step under this quorum."""
        return [name for name, lease in self.leases.items() if not lease.is_spent]

    def is_awaited(self, replica_id: str) -> bool:
        """Return whether the lighthouse has restarted and is still waiting for this member to reconnect."""
        lease = self.leases.get(replica_id)
        return self.phase is QuorumPhase.RETURNING and lease is not None and lease.is_awaited

    def is_holder(self, replica_id: str, incarnation: str) -> bool:
        return self._find_lease(replica_id, incarnation) is not None

    def quorum_lost_with(self, replica_id: str, incarnation: str) -> int | None:
        """Return the id of the quorum that ends if this member is lost, or None if none ends."""
        return self.quorum.quorum_id if self.quorum is not None and self._is_needed(replica_id, incarnation) else None

    def current_order(self) -> QuorumOrder:
        return QuorumOrder(self.quorum.quorum_id if self.quorum else 0, self.phase, self.upto, self.reason, self.lost)

    def order_for_held(self, replica_id: str, incarnation: str, held: HeldQuorum | None) -> QuorumOrder | None:
        """Return the current order for a member, or a revoke if it holds a quorum that is not the current one.

        Return None if `held` is None: the member holds no quorum.
        """
        if held is None:
            return None
        if self.is_holder(replica_id, incarnation) and self.quorum and held.quorum_id == self.quorum.quorum_id:
            return self.current_order()
        return QuorumOrder(held.quorum_id, QuorumPhase.REVOKED, reason="the lighthouse no longer holds this quorum")

    def leases_free_at(self, chosen: Iterable[Group] = ()) -> float:
        """Return when leases no longer prevent the joined groups `chosen` from forming a quorum (standing.py, rule 4).

        If `chosen` includes a member, only the leases of members that have not reported since the restart count.
        """
        if self.leases and any(self.is_holder(p.replica_id, p.incarnation) for p in chosen):
            return max((lease.until for lease in self.leases.values() if not lease.has_reported), default=0.0)
        if self._free_at is None:
            self._free_at = max((lease.until for lease in self.leases.values()), default=0.0)
        return self._free_at

    def unreported_members(self, now: float) -> list[str]:
        """List the members that have not reported since this lighthouse started, and may still have a lease."""
        if now >= self._all_reported_at:
            return []
        return sorted(name for name, lease in self.leases.items() if not lease.has_reported and now < lease.until)

    def returns_until(self) -> float | None:
        if self.phase is not QuorumPhase.RETURNING:
            return None
        return max(self._returns_until, min(self._confirmed_at + STILL_COME_S, self._returns_at_most))

    # -- events

    def begin_standing(self, quorum: Quorum, leases: dict[str, Lease]) -> None:
        """Begin the STANDING phase of a new quorum. `leases` contains the lease of each member."""
        self._begin_phase(QuorumPhase.STANDING, quorum)
        self.leases, self._free_at = leases, None

    def end_standing(self) -> None:
        """Record that the quorum that has just formed is not a standing one."""
        self._begin_phase(QuorumPhase.NONE)

    def restore_standing(self, record: QuorumRecord | None, until: float, at_most: float | None = None) -> None:
        """Begin to wait for the members of an earlier lighthouse's quorum to reconnect.

        Args:
            record: The stored quorum. If None, any group may hold an unknown quorum.
            until: Time by which all members must have reconnected.
            at_most: Latest time to which `until` is extended while members are arriving, or None for no extension.
        """
        quorum = record.quorum if record is not None else None
        stood = record is not None and record.stands
        self._begin_phase(QuorumPhase.RETURNING, quorum if stood else None)
        self.is_unheld = quorum is not None and not stood
        self._returns_until, self._returns_at_most = until, until if at_most is None else at_most
        if record is not None and quorum is not None and stood:
            for member in quorum.participants:
                name = member.replica_id
                self.leases[name] = Lease(member.incarnation, until, record.entries[name], has_reported=False)
            self._await_members(self.leases.values())
            self._free_at = self._all_reported_at = until

    def revoke_unknown_holders(self, until: float, reason: str) -> QuorumOrder | None:
        """Revoke the quorum, because the journal is outdated, and wait until all leases have expired.

        Groups that the journal does not list as members may have leases until `until`.
        """
        order = None if self.is_unheld else self.revoke_quorum(reason)
        self._returns_until = self._returns_at_most = max(until, self.leases_free_at())
        self._begin_phase(QuorumPhase.RETURNING)
        return order

    def postpone_waits(self, by_s: float) -> None:
        """Postpone the ends of waits by the `by_s` seconds of a pause, in which no member could reconnect."""
        self._returns_until += by_s
        self._returns_at_most += by_s
        self._confirmed_at += by_s

    def extend_lease(self, replica_id: str, incarnation: str, until: float) -> None:
        """Extend a member's lease after an answered heartbeat. Do nothing if the quorum is revoked."""
        lease = self._find_lease(replica_id, incarnation)
        if lease is not None and self.phase is not QuorumPhase.REVOKED:
            lease.until = max(lease.until, until)
            self._free_at = None if self._free_at is None else max(self._free_at, lease.until)

    def handle_held_quorum(
        self, replica_id: str, incarnation: str, held: HeldQuorum | None, now: float
    ) -> QuorumOrder | None:
        """Handle the quorum state in a member's hello or heartbeat. Return an order for all members, or None."""
        lease = self._lease_of_reporter(replica_id, incarnation)
        if lease is None or self.phase in (QuorumPhase.NONE, QuorumPhase.REVOKED):
            return None
        if held is None or self.quorum is None or held.quorum_id != self.quorum.quorum_id:
            # The script ended while the quorum was forming. The member runs no step of this quorum and joins no other.
            if held is not None and held.mode is HoldState.LEAVING:
                return self._revoke_without(replica_id, "has left")
            return None  # the member's join contains the details
        if held.mode is HoldState.REVOKED:
            return self.revoke_quorum(f"{replica_id} left it")
        if held.mode is HoldState.LEAVING:
            return self._record_leaver(replica_id, held.granted, now)
        if self.phase is QuorumPhase.RETURNING:
            return self._confirm_return(replica_id, now, needs_recall=held.mode is not HoldState.STANDING)
        if held.mode is HoldState.STANDING:
            return self.recall_quorum(f"{replica_id} has caught up, or cannot") if held.wants_next else None
        order = self.recall_quorum("a member has stopped granting") if self.phase is QuorumPhase.STANDING else None
        is_spent = held.mode is HoldState.JOINING
        if is_spent or (self.phase is QuorumPhase.RECALLED and held.mode is HoldState.RECALLED):
            return self._note_grant(replica_id, held.granted, is_spent=is_spent) or order
        return order

    def _record_leaver(self, replica_id: str, committed: int, now: float) -> QuorumOrder | None:
        lease = self.leases[replica_id]
        lease.has_left = self._has_leaver = True
        if self.phase is QuorumPhase.RETURNING:
            lease.granted, lease.is_spent = committed, True
            return self._confirm_return(replica_id, now, needs_recall=True)
        order = self.recall_quorum(f"{replica_id} has left") if self.phase is QuorumPhase.STANDING else None
        return self._note_grant(replica_id, committed, is_spent=True) or order

    def handle_member_join(self, participant: Participant, now: float) -> Outcome:
        """Handle a member's request for the next quorum.

        Return an order for all members, an instruction to resend the quorum to this member, or None.
        """
        lease = self._lease_of_reporter(participant.replica_id, participant.incarnation)
        if lease is None or self.quorum is None or self.phase in (QuorumPhase.NONE, QuorumPhase.REVOKED):
            return None
        name = participant.replica_id
        if participant.seen_quorum_id != self.quorum.quorum_id:
            if entry_of(participant) != lease.entry:
                return self.revoke_quorum(f"{name} has lost it")
            is_awaited = self.phase is QuorumPhase.RETURNING
            return ResendQuorum(self._confirm_return(name, now, needs_recall=False) if is_awaited else None)
        if participant.commit_failures > 0:
            return self.revoke_quorum(f"{name} has discarded its step")
        if self.phase is QuorumPhase.RETURNING:
            lease.granted, lease.is_spent = participant.requested_step - 1, True
            return self._confirm_return(name, now, needs_recall=True)
        if self.phase is QuorumPhase.RESUMED:
            if participant.requested_step <= self.upto:
                return self.revoke_quorum(f"{name} asks for step {participant.requested_step} already")
            return self._note_grant(name, participant.requested_step - 1, is_spent=True)
        order = self.recall_quorum(f"{name} asks for a quorum") if self.phase is QuorumPhase.STANDING else None
        return self._note_grant(name, participant.requested_step - 1, is_spent=True) or order

    def handle_member_loss(self, replica_id: str, incarnation: str, reason: str) -> QuorumOrder | None:
        """Handle the loss of a member: it disconnected, went down, or restarted under another incarnation."""
        if not self._is_needed(replica_id, incarnation):
            return None
        return self._revoke_without(replica_id, reason)

    def end_lease(self, replica_id: str, incarnation: str) -> None:
        """End the lease of a member whose manager has joined with restarted ranks and so grants no more steps."""
        lease = self._find_lease(replica_id, incarnation)
        if lease is not None:
            lease.until = 0.0
            self._free_at = None

    def handle_member_leave(self, replica_id: str, incarnation: str) -> QuorumOrder | None:
        """Handle a member that has left cleanly. Revoke the quorum if it needs the member and is not RESUMED."""
        if self.phase is QuorumPhase.RESUMED or not self._is_needed(replica_id, incarnation):
            return None
        return self._revoke_without(replica_id, "has left")

    def _revoke_without(self, replica_id: str, reason: str) -> QuorumOrder | None:
        """Revoke the quorum because of a lost member. If it is already revoked, name the member in the order."""
        if self.phase is QuorumPhase.REVOKED and not self.lost:
            self.reason, self.lost = f"{replica_id}: {reason}", replica_id
            return self.current_order()
        order = self.revoke_quorum(f"{replica_id}: {reason}")
        if order is None:
            return None
        self.lost = replica_id
        return self.current_order()

    def _is_needed(self, replica_id: str, incarnation: str) -> bool:
        """Return whether the loss of this member ends the quorum."""
        lease = self._find_lease(replica_id, incarnation)
        if lease is None or lease.has_left:
            return False
        return not self.is_awaited(replica_id)

    def recall_quorum(self, reason: str) -> QuorumOrder | None:
        if self.phase is not QuorumPhase.STANDING:
            return None
        self.phase, self.reason = QuorumPhase.RECALLED, reason
        self._await_members(lease for lease in self.leases.values() if lease.granted is None)
        self.recalls += 1
        return self.current_order()

    def revoke_quorum(self, reason: str) -> QuorumOrder | None:
        if self.phase in (QuorumPhase.NONE, QuorumPhase.REVOKED):
            return None
        self.phase, self.reason = QuorumPhase.REVOKED, reason
        self.revokes += 1
        return self.current_order()

    def end_overdue_wait(self, now: float) -> QuorumOrder | None:
        until = self.returns_until()
        if until is None or now < until:
            return None
        if not self.leases:
            self._begin_phase(QuorumPhase.NONE)
            return None
        away = sorted(name for name, lease in self.leases.items() if lease.is_awaited)
        return self.revoke_quorum(f"not reconnected within the lease: {', '.join(away)}")

    # -- internals

    def _begin_phase(self, phase: QuorumPhase, quorum: Quorum | None = None) -> None:
        self.quorum = quorum
        self.phase, self.upto, self.reason, self.lost = phase, 0, "", ""
        self.is_unheld, self.leases = False, {}
        self._needs_recall = self._has_leaver = False
        self._awaited, self._all_reported_at, self._free_at = 0, 0.0, 0.0

    def _find_lease(self, replica_id: str, incarnation: str) -> Lease | None:
        lease = self.leases.get(replica_id)
        return lease if lease is not None and lease.incarnation == incarnation else None

    def _lease_of_reporter(self, replica_id: str, incarnation: str) -> Lease | None:
        lease = self._find_lease(replica_id, incarnation)
        if lease is not None:
            lease.has_reported = True
        return lease

    def _confirm_return(self, replica_id: str, now: float, *, needs_recall: bool) -> QuorumOrder | None:
        if self._stop_awaiting(self.leases[replica_id]):
            self._confirmed_at = now
        self._needs_recall |= needs_recall
        if self._awaited:
            return None
        self.phase = QuorumPhase.STANDING
        if not self._needs_recall:
            return self.current_order()
        order = self.recall_quorum("a member returned during a recall")
        return self._resume_when_reported() or order

    def _await_members(self, awaited: Iterable[Lease]) -> None:
        """Begin to wait for reports from these members. No earlier wait may still be in progress."""
        for lease in awaited:
            lease.is_awaited = True
            self._awaited += 1

    def _stop_awaiting(self, lease: Lease) -> bool:
        """Stop waiting for the member. Return whether the current phase was waiting for it."""
        was_awaited, lease.is_awaited = lease.is_awaited, False
        self._awaited -= was_awaited
        return was_awaited

    def _note_grant(self, replica_id: str, granted: int, *, is_spent: bool) -> QuorumOrder | None:
        lease = self.leases[replica_id]
        lease.granted = granted
        lease.is_spent |= is_spent
        self._stop_awaiting(lease)
        return self._resume_when_reported() if self.phase is QuorumPhase.RECALLED else self._end_when_done()

    def _resume_when_reported(self) -> QuorumOrder | None:
        """Once all members have reported the newest step that they started, resume up to the last that all can do."""
        if self.phase is not QuorumPhase.RECALLED or self._awaited:
            return None
        granted = [lease.granted or 0 for lease in self.leases.values()]
        last_steps = [lease.granted or 0 for lease in self.leases.values() if lease.has_left]
        # If all members ask for step 0 again, their highest grant counts as -1.
        self.upto = max(0, min([max(granted), *last_steps]))
        behind = [n for n, h in self.leases.items() if h.is_spent and (h.granted or 0) < self.upto]
        if behind:
            return self.revoke_quorum(f"{behind[0]} cannot do step {self.upto} any more")
        self.phase = QuorumPhase.RESUMED
        self._await_members(h for h in self.leases.values() if not h.is_spent and (h.granted or 0) <= self.upto)
        return self._end_when_done() or self.current_order()

    def _end_when_done(self) -> QuorumOrder | None:
        """If a member has left, end the quorum once all members have completed the last step (standing.py, rule 3)."""
        if self.phase is not QuorumPhase.RESUMED or not self._has_leaver or self._awaited:
            return None
        left = next(name for name, lease in self.leases.items() if lease.has_left)
        if any(not lease.is_spent for lease in self.leases.values()):
            return self._revoke_without(left, "has left")
        self.phase, self.reason = QuorumPhase.REVOKED, f"{left} has left, and all have done step {self.upto}"
        return self.current_order()


def lease_of(member: Group) -> Lease:
    """Return the lease that a member has when its quorum forms."""
    assert member.participant is not None
    return Lease(member.incarnation, member.lease_until, entry_of(member.participant, member.secret))


def entry_of(participant: Participant, secret: str = "") -> JoinState:
    return JoinState(participant.step, participant.tag_quorum_id, participant.commit_failures, secret)
