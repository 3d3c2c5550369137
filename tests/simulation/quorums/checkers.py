"""S1 to S4, S11 and S14 of docs/contributing/protocol.md, checked from outside the machines.

These checkers note the quorums that the lighthouse forms and sends, the steps that managers receive and grant, and the
commits of ranks. They check each rule that can be broken in a moment in that moment. S5 and S12 are in simulation.py,
and S6 to S9, which concern a whole run, in promises.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lighthouse.job.records import QuorumRecord
from lighthouse_protocol.messages.membership import Assignment, Quorum, Tag
from tests.simulation.network import LIGHTHOUSE_HOST
from tests.simulation.world import Violation, World

if TYPE_CHECKING:
    from tests.simulation.quorums.collectives import Collectives
    from tests.simulation.quorums.group import Group
    from tests.simulation.quorums.manager import ManagerProcess
    from tests.simulation.quorums.rank import Rank
    from tests.simulation.quorums.torchft_manager import TorchftManager

    Manager = ManagerProcess | TorchftManager

BRANCH_S = 500.0  # the lighthouse counts ten minutes, by a clock that may be fast
Identity = tuple[str, str, str, str]
Start = tuple[int, int, str, float]  # quorum_id, step, group, and when its ranks were started


class Checkers:
    def __init__(self, world: World, collectives: "Collectives") -> None:
        self._world = world
        self._collectives = collectives
        self._lists: dict[int, tuple[Identity, ...]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._said: dict[int, set[Quorum]] = {}  # all that was told under an id, with the states of its members
        self._told: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # the step of each told quorum
        self.told_at: dict[int, float] = {}
        self._authors: dict[int, str] = {}
        self._members: list[frozenset[tuple[str, str]]] = []
        self._granted: dict[int, tuple[int, int]] = {}
        self._states: dict[tuple[int, int, int], int | None] = {}
        self._decisions: dict[tuple[int, int, str], dict[Rank, bool]] = {}
        self._contributed: dict[Start, Tag] = {}
        self._serving: dict[tuple[int, int, int], dict[str, int]] = {}
        self._committed: dict[int, set[int]] = {}  # the steps that some rank has committed, by quorum_id
        self.find_group: Callable[[str], Group | None] = lambda address: None
        self.on_discard: Callable[[Rank, int, int], None] = lambda rank, quorum_id, step: None
        self.last_commit_at: dict[str, float] = {}
        self.longest_gap_s: dict[str, float] = {}
        self.newest_id = 0

    # -- the lighthouse

    def formed(self, quorum: Quorum, *, stands: bool) -> None:
        if stands and quorum.quorum_id in self._lists:
            raise Violation(f"S1 quorum {quorum.quorum_id} stands, and is formed once more")
        self._name(quorum)

    def job_ended(self) -> None:
        """Note that the next quorum begins another training run, whatever state an absent group still holds."""
        self._starts.clear()

    def told(self, quorum: Quorum, record: QuorumRecord | None, author: str) -> None:
        """Note that the lighthouse is about to send a quorum. `record` is the newest record of its journal."""
        written = record.quorum if record else None
        self._name(quorum)
        self._said.setdefault(quorum.quorum_id, set()).add(quorum)
        if written is None or identities(written) != identities(quorum) or written.quorum_id != quorum.quorum_id:
            raise Violation(
                f"S1 quorum {quorum.quorum_id} is told, and the journal has {written and written.quorum_id}"
            )
        if author == LIGHTHOUSE_HOST:
            self.newest_id = quorum.quorum_id
        self._authors[quorum.quorum_id] = author
        self._check_kept(quorum)
        if quorum.quorum_id not in self._told:
            self._world.counts["quorums"] += 1
            self._told[quorum.quorum_id] = len(self._members)
            self._starts[quorum.quorum_id] = max(p.step for p in quorum.participants)
            self.told_at[quorum.quorum_id] = self._world.now
            self._members.append(frozenset((p.replica_id, p.incarnation) for p in quorum.participants))

    def _check_kept(self, quorum: Quorum) -> None:
        """Check that a quorum does not start below a committed step that a member holds.

        This applies if the member has been in every quorum since, and none of them committed a step, or if all of them
        have started below the quorum that committed the state. Two lighthouses cannot know of each other's commits. Of
        the quorums that a rolled-back journal lacks, a lighthouse learns only the newest one of each member.
        """
        if len(set(self._authors.values())) > 1:
            return
        is_rolled_back = bool(self._world.counts["fault: roll_back_journal"])
        max_step = max(member.step for member in quorum.participants)
        for member in quorum.participants:
            group = self.find_group(member.address)
            held = group.whole_state if group is not None and not group.has_lied else None
            if held is None or held.quorum_id is None or held.quorum_id != member.tag_quorum_id:
                continue
            if is_rolled_back and held.quorum_id != member.seen_quorum_id:
                continue
            was_committed = held.step - 1 in self._committed.get(held.quorum_id, ())
            is_kept = self._has_taken_part(member.wire_id, held.quorum_id) or self._is_before_branch(held.quorum_id)
            if max_step < held.step and was_committed and is_kept:
                raise Violation(
                    f"S14 {member.replica_id} holds step {held.step} of quorum {held.quorum_id}, which was committed, "
                    f"and quorum {quorum.quorum_id} goes on from step {max_step}"
                )

    def _has_taken_part(self, wire_id: str, since_id: int) -> bool:
        """Return whether a group was in every later quorum, and none of them committed a step."""
        later = [quorum_id for quorum_id in self._told if quorum_id > since_id]
        return all(wire_id in self._names[quorum_id] and quorum_id not in self._committed for quorum_id in later)

    def _is_before_branch(self, since_id: int) -> bool:
        """Return whether each later quorum has started below this one, and the first of them lately."""
        later = [quorum_id for quorum_id in self._told if quorum_id > since_id]
        if since_id not in self._starts or not later or self._world.now > self.told_at[min(later)] + BRANCH_S:
            return False
        return all(self._starts[quorum_id] < self._starts[since_id] for quorum_id in later)

    def _name(self, quorum: Quorum) -> None:
        named = self._lists.setdefault(quorum.quorum_id, identities(quorum))
        if named != identities(quorum):
            raise Violation(f"S1 quorum_id {quorum.quorum_id} names {_show(named)} and {_show(identities(quorum))}")
        if quorum.quorum_id not in self._names:
            self._names[quorum.quorum_id] = tuple(p.wire_id for p in quorum.participants)

    # -- managers

    def handed(self, manager: "Manager", quorum: Quorum) -> None:
        known_id = manager.seen_id if manager.is_torchft else manager.told_id  # what was not opened is asked for again
        if quorum.quorum_id < known_id and not self._cannot_know(manager, quorum):
            raise Violation(f"S2 {manager.name} has seen quorum {known_id} and is handed {quorum.quorum_id}")
        manager.seen_id = quorum.quorum_id
        self._name(quorum)
        if quorum not in self._said[quorum.quorum_id]:
            raise Violation(f"S1 {manager.name} takes quorum {quorum.quorum_id} for another one than it was told")

    def _cannot_know(self, manager: "Manager", quorum: Quorum) -> bool:
        """Return whether a manager may go back to a lower id.

        torchft's managers do not report ids that they have seen.
        """
        authors = {self._authors[manager.seen_id], self._authors[quorum.quorum_id]}
        return manager.is_torchft and len(authors) > 1

    def answered(self, manager: "Manager", assignment: Assignment, *, is_grant: bool) -> None:
        """Note that a manager lets a rank into a step."""
        quorum_id, step = assignment.quorum_id, assignment.max_step
        if quorum_id < manager.told_id and not manager.is_torchft:
            raise Violation(f"S2 {manager.name} has answered quorum {manager.told_id} and answers {quorum_id}")
        is_first = manager.told_id != quorum_id or manager.granted < step
        manager.told_id = quorum_id
        if is_first:
            manager.granted = step
        if is_grant and is_first and not assignment.revoked:
            self._check_alone(manager, quorum_id, step)

    def _check_alone(self, manager: "Manager", quorum_id: int, step: int) -> None:
        """Check that no later quorum without a common member trains at the same time.

        Quorums of two lighthouses may: the tags distinguish their states.
        """
        place = self._told[quorum_id]
        for later in range(place + 1, len(self._members)):
            if self._members[place] & self._members[later]:
                return  # that member takes no part any more, so no step of this one can complete
            other = next(q for q, index in self._told.items() if index == later)
            if self._authors[other] != self._authors[quorum_id]:
                return
            raise Violation(f"S3 {manager.name} grants step {step} of quorum {quorum_id} beside quorum {other}")

    # -- ranks

    def begun(self, rank: "Rank", assignment: Assignment) -> None:
        if assignment.replica_ids != self._names[assignment.quorum_id]:
            raise Violation(f"S1 {rank.name}: quorum {assignment.quorum_id} is of {assignment.replica_ids}")
        if assignment.place is not None and not assignment.heals:
            self._serves(rank, assignment)

    def _serves(self, rank: "Rank", assignment: Assignment) -> None:
        """Check that the groups at `max_step` share the heals evenly."""
        key = assignment.quorum_id, assignment.max_step, rank.group_rank
        serving = self._serving.setdefault(key, {})
        serving[rank.name] = len(assignment.serve_to)
        if max(serving.values()) - min(serving.values()) > 1:
            raise Violation(f"S7 quorum {assignment.quorum_id} has those that heal served by {serving}")

    def contributes(self, rank: "Rank", assignment: Assignment) -> None:
        if rank.state is None:
            raise Violation(f"S3 {rank.name} contributes from a state that was installed in part")
        key = (assignment.quorum_id, assignment.max_step, rank.site.name, rank.began_at)
        if (tag := self._contributed.setdefault(key, Tag(*rank.machine.tag))) != rank.machine.tag:
            mine = Tag(*rank.machine.tag)
            raise Violation(f"S3 {rank.name} contributes from {mine}, and another rank of its group from {tag}")

    def forced_commit(self, rank: "Rank") -> None:
        raise Violation(f"S4 {rank.name} voted no for step {rank.machine.step} and is told to commit it")

    def committed(self, rank: "Rank", assignment: Assignment) -> None:
        quorum_id, step = assignment.quorum_id, assignment.max_step
        where = f"step {step} of quorum {quorum_id}"
        took_part = self._collectives.completed.get((quorum_id, step, rank.group_rank))
        if took_part != self._names[quorum_id]:
            raise Violation(f"S4 {rank.name} commits {where} of {self._names[quorum_id]}; took part: {took_part}")
        self._decide(rank, assignment, commit=True)
        self._committed.setdefault(quorum_id, set()).add(step)
        now = self._world.now
        gap_s = now - self.last_commit_at.get(rank.name, now)
        self.longest_gap_s[rank.name] = max(gap_s, self.longest_gap_s.get(rank.name, 0.0))
        self.last_commit_at[rank.name] = now
        self._world.counts["commits"] += 1

    def holds(self, rank: "Rank", tag: Tag) -> None:
        """Check that a tag names one state."""
        if tag.quorum_id:
            was = self._states.setdefault((tag.step, tag.quorum_id, rank.group_rank), rank.state)
            if was != rank.state:
                raise Violation(f"S3 tag {tuple(tag)} names two states; {rank.name} has another than one before it")

    def ended(self, rank: "Rank", reason: str, explained_by: str) -> None:
        """Note that a rank exits on its own. A healthy rank has no reason to."""
        if not explained_by:
            raise Violation(f"S11 {rank.name} ends by itself, and no fault explains it: {reason}")

    def discarded(self, rank: "Rank", assignment: Assignment) -> None:
        self._decide(rank, assignment, commit=False)
        self._world.counts["discards"] += 1
        self.on_discard(rank, assignment.quorum_id, assignment.max_step)

    def _decide(self, rank: "Rank", assignment: Assignment, *, commit: bool) -> None:
        """Check that all live ranks of a group decide alike. The decision of a dead rank is lost with it."""
        decided = self._decisions.setdefault((assignment.quorum_id, assignment.max_step, rank.site.name), {})
        decided[rank] = commit
        for other, was in decided.items():
            if was != commit and other.is_up:
                what = f"step {assignment.max_step} of quorum {assignment.quorum_id}"
                ours, theirs = ("commits", "discarded") if commit else ("discards", "committed")
                raise Violation(f"S4 {rank.name} {ours} {what}, {other.name} {theirs} it")


def identities(quorum: Quorum) -> tuple[Identity, ...]:
    return tuple(p.identity for p in quorum.participants)


def _show(named: tuple[Identity, ...]) -> str:
    return "[" + ", ".join(f"{replica_id}/{incarnation}" for replica_id, incarnation, _, _ in named) + "]"
