"""One rank's request for a quorum, and what is said against it."""

from dataclasses import dataclass

from lighthouse_protocol.messages.membership import PLAIN, CatchUp, Distrust, Tag
from lighthouse_protocol.refusals import InvalidRequest, LighthouseError, Superseded, Unrecoverable, WrongState


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """One rank's call. `rank_incarnation` is empty, and `tag_quorum_id` None, for a caller that does not say."""

    call: int
    group_rank: int
    step: int
    deadline_at: float
    checkpoint_address: str = ""
    tag_quorum_id: int | None = None
    rank_incarnation: str = ""
    shrink_only: bool = False
    init_sync: bool = True
    commit_failures: int = 0
    handle: str = ""
    catch_up: CatchUp = PLAIN
    compares: bool = False
    distrust: Distrust | None = None
    heals_first: bool | None = None

    @property
    def holds(self) -> Tag:
        """The state that the rank holds."""
        return self.catch_up.held or Tag(self.step, self.tag_quorum_id)


def check_rank(group_rank: int, group_world_size: int) -> None:
    if not 0 <= group_rank < group_world_size:
        raise no_such_rank(group_rank, group_world_size)


def no_such_rank(group_rank: int, group_world_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"is {group_rank}; the group has ranks 0 to {group_world_size - 1} (--group-world-size)", field="rank"
    )


def superseded(group_rank: int) -> Superseded:
    return Superseded(f"rank {group_rank} has asked again")


def steps_differ(ask: QuorumRequest, other: QuorumRequest) -> Unrecoverable:
    return Unrecoverable(
        f"step: rank {ask.group_rank} is at step {ask.step} and rank {other.group_rank} at {other.step}; the ranks of "
        "a group advance together: restart the group, or load one checkpoint in all its ranks"
    )


def no_state(ask: QuorumRequest, other: QuorumRequest, *, may_heal: bool) -> LighthouseError:
    """They hold different states, or `other` holds none. `may_heal`: a peer that could heal them may come back."""
    torn = other.distrust
    what = f"{torn.text if torn is not None else _differ(ask, other)}, and no other group can heal them"
    if may_heal:
        return WrongState(f"step: {what} at the moment; ask again until one returns")
    what_to_do = "load one checkpoint in all its ranks" if torn is None else "the job from its last checkpoint"
    return Unrecoverable(f"step: {what}: restart the group, or {what_to_do}")


def _differ(ask: QuorumRequest, other: QuorumRequest) -> str:
    held, other_held = ask.holds, other.holds
    return (
        f"rank {ask.group_rank} holds step {held.step} of quorum {held.quorum_id} and rank {other.group_rank} step "
        f"{other_held.step} of quorum {other_held.quorum_id}"
    )
