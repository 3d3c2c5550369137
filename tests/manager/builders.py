"""Short words for what goes into the manager's machines."""

from lighthouse_protocol.messages.membership import Participant, Quorum
from manager.group.events import QuorumRequest


def member(name: str, step: int = 0, **fields: object) -> Participant:
    return Participant(name, step=step, address=f"{name}:1", store_address=f"{name}:2", **fields)


def quorum(*members: Participant, quorum_id: int = 1) -> Quorum:
    return Quorum(quorum_id, members)


def ask(call: int, group_rank: int, step: int = 0, deadline_at: float = 100.0, **fields: object) -> QuorumRequest:
    """Of an Agent, unless `rank_incarnation` is empty."""
    defaults = {"rank_incarnation": f"w{group_rank}", "checkpoint_address": f"ckpt{group_rank}"}
    return QuorumRequest(call, group_rank, step, deadline_at, **(defaults | fields))
