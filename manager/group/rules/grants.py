"""The manager's half of a standing quorum: it answers its ranks' requests for the next step by itself.

It grants step n under quorum q if and only if

1. q stands, and is neither revoked, nor recalled below n;
2. all ranks of the group have committed n - 1 under q, or n is the step that q was formed for;
3. its lease is valid: less than LEASE_SHARE of it has passed since the newest answered heartbeat was sent.

The first rank's request decides; the others get the same answer, flagged if the quorum was revoked since: then they
run the step and vote no, so that none waits for another. So does one that holds no state any more, where its group is
in that step already; else it joins, and heals. While it is recalled, or its lease has run out, ranks wait.
It joins only when it was resumed and is past the last step, when it was revoked, or when a step failed; and then it
never grants under that quorum again, whatever becomes of the join. Where a rank ends in good order, with all that was
committed and nothing begun, the group leaves: the step that it was granted beyond that is given back.

A quorum in which a group is told to heal too late is for its first step only: it counts as resumed up to that from the
beginning. That group does the step with zeros and votes no, and no peer loses anything by that: it joins as the others
do, once all its ranks have voted.
"""

from dataclasses import dataclass, replace

from lighthouse_protocol.messages.membership import Assignment, CatchUp, Quorum
from lighthouse_protocol.messages.session import HeldQuorum, HoldState, QuorumOrder, QuorumPhase
from manager.group.rules.assignment import assign, is_for_one_step
from manager.group.rules.request import QuorumRequest

# The lighthouse counts the whole lease from a heartbeat's arrival, so clocks may differ in rate by a tenth.
LEASE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Granted:
    """`is_first`: no rank has been let into that step before."""

    assignment: Assignment
    is_first: bool


class Wait:
    """Until the lighthouse has said more."""


@dataclass(frozen=True, slots=True)
class Join:
    """The lighthouse is to be asked. `gives_up`: the quorum is over by this, for all ranks of the group."""

    gives_up: bool = False


class GrantMachine:
    def __init__(self, wire_id: str, group_world_size: int = 1) -> None:
        self._wire_id = wire_id
        self._size = group_world_size
        self._quorum: Quorum | None = None
        self._formed_for = 0
        self._committed = -1
        self._upto = 0
        self._assigned: dict[tuple[int, bool], Assignment] = {}
        self._catching_up: dict[int, CatchUp] = {}
        self._wants_next = False
        self._knows_lost = False
        self._is_revoked_by_order = False
        self._is_late = False
        self._voted: set[int] = set()
        self.mode = HoldState.REVOKED
        self.granted = 0
        self.lease_until = 0.0
        self.renewed_until = 0.0  # by the newest answer to a heartbeat
        self.given = 0  # steps let in without asking, under any quorum

    @property
    def held(self) -> HeldQuorum | None:
        if self._quorum is None:
            return None
        return HeldQuorum(self._quorum.quorum_id, self.mode, self.granted, self._wants_next)

    @property
    def grants(self) -> bool:
        """It may let ranks into a further step by itself."""
        return self._quorum is not None and self.mode in (HoldState.STANDING, HoldState.RECALLED, HoldState.RESUMED)

    @property
    def is_leaving(self) -> bool:
        """Its ranks have ended in good order, and the quorum is not over yet."""
        return self._quorum is not None and self.mode is HoldState.LEAVING

    @property
    def has_done_late_step(self) -> bool:
        """This group was told to heal too late, has done its part in the step all the same, and asks for the next
        quorum."""
        return self._quorum is not None and self._is_late and self.mode is HoldState.JOINING

    def take(self, quorum: Quorum, step: int, *, init_sync: bool = True) -> None:
        """`quorum` was formed for `step`, and stands."""
        self._quorum, self._formed_for, self.granted = quorum, step, step
        self._committed, self._upto = -1, step
        self._assigned = {}
        self._catching_up, self._wants_next, self._knows_lost = {}, False, False
        self._is_revoked_by_order = False
        mine, self._voted = self._assign(0, init_sync), set()
        self._is_late = mine.place is None and not (mine.heals or mine.catches_up)
        self.mode = HoldState.RESUMED if self._is_for_one_step(init_sync) else HoldState.STANDING
        self.lease_until = self.renewed_until  # an earlier lighthouse may have given a longer lease

    def drop(self) -> None:
        """The quorum that was assigned now does not stand."""
        self._quorum = None

    def committed(self, quorum_id: int, step: int) -> None:
        """All ranks of the group."""
        if self._quorum is not None and self._quorum.quorum_id == quorum_id:
            self._committed = max(self._committed, step)
            self._end_when_done()

    def voted(self, group_rank: int, quorum_id: int | None, step: int) -> bool:
        """That rank has done its part in the step. Whether it is the last one of a group that was told too late."""
        if self._quorum is None or (quorum_id, step) != (self._quorum.quorum_id, self.granted):
            return False
        self._voted.add(group_rank)
        return self._is_late and len(self._voted) == self._size

    def ends_by_discard(self, quorum_id: int) -> bool:
        """Whether a discard under that quorum ends it: a group that was told to heal too late discards its step, while
        its other ranks may still take part in their peers'."""
        return self._quorum is not None and self._quorum.quorum_id == quorum_id and not self._is_late

    def renew(self, until: float) -> None:
        self.renewed_until = until
        self.lease_until = max(self.lease_until, until)

    def obey(self, order: QuorumOrder) -> bool:
        """Whether the ranks are to be told that the quorum is revoked."""
        if self._quorum is None or order.quorum_id != self._quorum.quorum_id:
            return False
        if order.phase is QuorumPhase.REVOKED:
            return self._end(order.lost)
        if not self.grants:
            return False
        match order.phase:
            case QuorumPhase.RECALLED:
                self.mode = HoldState.RECALLED
            case QuorumPhase.RESUMED:
                self.mode, self._upto = HoldState.RESUMED, order.upto
                self._end_when_done()
            case QuorumPhase.NONE | QuorumPhase.RETURNING | QuorumPhase.STANDING:
                pass
        return False

    def _end_when_done(self) -> None:
        """It has done the last step that it may: no peer waits for it any more."""
        if self.mode is HoldState.RESUMED and self._committed == self.granted >= self._upto:
            self.mode = HoldState.JOINING

    def _end(self, lost: str) -> bool:
        """Whether that is news: the end, or which group was lost."""
        is_over = self.grants or self.is_leaving
        is_news = is_over or (bool(lost) and not self._knows_lost)
        self._knows_lost |= bool(lost)
        self._is_revoked_by_order |= self.grants
        if is_over:
            self.mode = HoldState.REVOKED
        return is_news

    def give_up(self) -> bool:
        """A step failed, or a rank was lost. Whether that changes anything."""
        changes = self.grants
        if changes:
            self.mode = HoldState.REVOKED
        return changes

    def leave(self, step: int | None) -> None:
        """A rank ends in good order, and would have asked for `step` next; None: it is in the middle of one.

        It also does so after the loss of a peer, if it had nothing to do any more: the lighthouse then knows that its
        script has ended.
        """
        has_done_all = self._is_revoked_by_order and self._committed == self.granted
        may_leave = self._quorum is not None and (self.grants or self.mode is HoldState.JOINING or has_done_all)
        self._is_revoked_by_order = False
        if may_leave and self._committed >= self._formed_for and step == self._committed + 1:
            self.mode, self.granted = HoldState.LEAVING, self._committed

    def decide(self, ask: QuorumRequest, now: float) -> Granted | Wait | Join:
        if self._quorum is None or self.mode in (HoldState.JOINING, HoldState.LEAVING):
            return Join()
        is_repeated = ask.step == self.granted and self._committed < ask.step and ask.commit_failures == 0
        if is_repeated and (ask.distrust is None or self._size > 1):
            return self._grant(ask, is_first=False)
        if self.mode is HoldState.REVOKED:
            return Join()
        if self._is_late and ask.group_rank in self._voted:
            if len(self._voted) < self._size:
                return Wait()
            self.mode = HoldState.JOINING
            return Join()
        has_failed = ask.commit_failures > 0 or ask.distrust is not None
        if has_failed or ask.step != self.granted + 1 or self._committed != self.granted:
            self.mode = HoldState.REVOKED
            return Join(gives_up=True)
        if self.mode is HoldState.RECALLED:
            return Wait()
        if now >= self.lease_until:
            return Wait()
        self.granted = ask.step
        self.given += 1
        return self._grant(ask, is_first=True)

    def offer(self, now: float) -> bool:
        """All ranks have committed the highest granted step: whether they may go on to the next at once."""
        is_free = self._quorum is not None and self.mode in (HoldState.STANDING, HoldState.RESUMED)
        if not is_free or self._committed != self.granted or now >= self.lease_until:
            return False
        self.granted += 1
        self.given += 1
        return True

    def assignment(self, group_rank: int, init_sync: bool) -> Assignment:
        """What the highest granted step means for a rank: after the step it was formed for, none heals but those that
        catch up, and these contribute to none."""
        formed = self._assign(group_rank, init_sync)
        revoked = self.mode is HoldState.REVOKED
        if self.granted == self._formed_for:
            return replace(formed, revoked=revoked)
        contributors = formed.replica_world_size - len(formed.catching_up)
        place = formed.replica_rank - sum(rank < formed.replica_rank for rank in formed.catching_up)
        return replace(
            formed,
            max_step=self.granted,
            max_rank=None if formed.catches_up else place,
            max_world_size=contributors,
            contributors=contributors,
            place=None if formed.catches_up else place,
            healing=(),
            tag_quorum_id=formed.quorum_id,
            heal_from_rank=None,
            heal_from_address="",
            other_sources=(),
            shares_with=(),
            serve_to=(),
            commit_failures=0,
            revoked=revoked,
        )

    def _assign(self, group_rank: int, init_sync: bool) -> Assignment:
        """Reckoned once a quorum: it is O(participants), and steps are many."""
        formed = self._assigned.get((group_rank, init_sync))
        if formed is None:
            assert self._quorum is not None
            formed = assign(self._quorum, self._wire_id, group_rank, init_sync, stands=True)
            assert formed is not None
            self._assigned[group_rank, init_sync] = formed
        return formed

    def _is_for_one_step(self, init_sync: bool) -> bool:
        assert self._quorum is not None
        return is_for_one_step(self._quorum, init_sync, self._size)

    def _grant(self, ask: QuorumRequest, *, is_first: bool) -> Granted:
        assignment = self.assignment(ask.group_rank, ask.init_sync)
        if assignment.catches_up and self.granted > self._formed_for:
            self._note_catch_up(ask, is_first)
        return Granted(assignment, is_first)

    def _note_catch_up(self, ask: QuorumRequest, is_first: bool) -> None:
        """All ranks hold what they work at, or one of them cannot get there under this quorum: another one is to come.
        Said until it has."""
        if is_first:
            self._catching_up = {}
        self._catching_up[ask.group_rank] = ask.catch_up
        if len(self._catching_up) == self._size:
            lagging = [rank for rank in self._catching_up.values() if rank.held is not None]
            self._wants_next |= not all(rank.has_source for rank in lagging) or not lagging
