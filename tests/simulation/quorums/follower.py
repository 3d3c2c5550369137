"""A rank that catches up: the Agent's follower around the pure CatchUpMachine, with hashes as the model."""

from typing import TYPE_CHECKING, NamedTuple

from agent_client.healing.rules.catch_up import CatchUpAction, CatchUpMachine, PendingStep, Transfer
from lighthouse_protocol.messages.membership import Assignment, CatchUp, Tag

if TYPE_CHECKING:
    from tests.simulation.quorums.rank import Rank, Snapshot

RETRY_S = 0.05
FULL_SHARE = 0.02
"""Of the steps find no room to be kept, where transfers break."""


class Step(NamedTuple):
    """The effect of a committed step on a state."""

    step: int
    total: int
    contributors: int

    def apply(self, state: int | None) -> int:
        return hash((state, *self))


class Follower:
    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self.catch_up: CatchUpMachine[Step] = CatchUpMachine()
        self._snapshot: Snapshot | None = None
        self._transfers = 0

    @property
    def is_catching_up(self) -> bool:
        return self.catch_up.is_catching_up

    def request_fields(self) -> CatchUp:
        catch_up = self.catch_up
        is_wanted = not (catch_up.heals_blocking or self._rank.machine.is_torn)
        return CatchUp(is_wanted, catch_up.held, catch_up.has_source)

    def answered(self, assignment: Assignment) -> None:
        rank, catch_up = self._rank, self.catch_up
        held = catch_up.held or Tag(*rank.machine.tag)
        action = catch_up.choose_action(assignment, held)
        if action is CatchUpAction.FETCH or catch_up.transfer is not Transfer.UNDER_WAY:
            self._transfers += 1
        if action is CatchUpAction.FETCH:
            self._fetch(self._transfers, assignment, rank.world.now + rank.plan.heal_timeout_s)
        if action is CatchUpAction.RETURN:
            rank.machine.work_at(*held)
        if catch_up.is_catching_up:
            rank.machine.work_at(*catch_up.peer_tag)

    def committed(self, step: Step) -> None:
        """Commit the present step of a rank that catches up."""
        rank, catch_up = self._rank, self.catch_up
        tag = Tag(*rank.machine.tag)
        is_full = rank.happens("no room for a step", FULL_SHARE if rank.plan.breaks else 0.0)
        catch_up.record_commit(PendingStep(tag, 1, step) if catch_up.can_keep and not is_full else None, tag)
        if catch_up.transfer is Transfer.ARRIVED:
            return self._install()
        for kept in catch_up.due_steps():
            rank.state = kept.content.apply(rank.state)
            catch_up.record_applied()
            rank.site.checkers.holds(rank, kept.tag)
            rank.world.counts["steps applied later"] += 1
        if not catch_up.is_catching_up:
            rank.log(f"has caught up at step {rank.machine.step}")
            rank.world.counts["caught up"] += 1
        return None

    def _install(self) -> None:
        rank = self._rank
        assert self._snapshot is not None
        if rank.happens("an install broke", rank.plan.breaks):
            return rank.exit("the install of a peer's state broke", explained_by="a drawn break")
        rank.state, self._snapshot = self._snapshot.state, None
        self.catch_up.record_install()
        rank.site.checkers.holds(rank, self.catch_up.begins)
        return None

    # -- the transfer

    def _fetch(self, number: int, assignment: Assignment, give_up_at: float) -> None:
        rank = self._rank
        if number != self._transfers:
            return
        source = rank.site.find_rank(assignment.heal_from_address, rank.group_rank)
        copies = source.copies if source is not None and source.is_up and not self._is_cut(source) else {}
        key = assignment.quorum_id, assignment.max_step
        if rank.world.now >= give_up_at:
            self._fail("no copy in time")
        elif source is None or key not in copies:
            rank.after(RETRY_S, self._fetch, number, assignment, give_up_at)
        else:
            took_s = rank.plan.heal_s * rank.world.random.uniform(0.5, 5)
            rank.after(took_s, self._fetched, number, source, copies[key])

    def _fetched(self, number: int, source: "Rank", snapshot: "Snapshot") -> None:
        rank = self._rank
        if number != self._transfers:
            return
        if not source.is_up or self._is_cut(source) or rank.happens("a transfer broke", rank.plan.breaks):
            self._fail("the transfer broke")
            return
        rank.log(f"has received step {snapshot.step} of quorum {snapshot.tag_quorum_id} from {source.name}")
        self._snapshot = snapshot
        self.catch_up.record_arrival(Tag(snapshot.step, snapshot.tag_quorum_id))

    def _is_cut(self, source: "Rank") -> bool:
        network, host = self._rank.site.network, self._rank.host
        return network.is_cut(source.host, host) or network.is_cut(host, source.host)

    def _fail(self, reason: str) -> None:
        self._rank.log(f"cannot catch up: {reason}")
        self._transfers += 1
        self.catch_up.record_failure()
