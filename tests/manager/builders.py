"""Short words for what goes into the manager's machines."""

from lighthouse_protocol.messages.membership import Participant, Quorum
from manager.group.records import QuorumRequest, ReplicaGroup
from manager.group.requests import GatherMachine


def member(name: str, step: int = 0, **fields: object) -> Participant:
    return Participant(name, step=step, address=f"{name}:1", store_address=f"{name}:2", **fields)


def quorum(*members: Participant, quorum_id: int = 1) -> Quorum:
    return Quorum(quorum_id, members)


def ask(call: int, group_rank: int, step: int = 0, deadline_at: float = 100.0, **fields: object) -> QuorumRequest:
    """Of an Agent, unless `rank_incarnation` is empty."""
    defaults = {"rank_incarnation": f"w{group_rank}", "checkpoint_address": f"ckpt{group_rank}"}
    return QuorumRequest(call, group_rank, step, deadline_at, **(defaults | fields))


def gathered(size: int = 2, step: int = 0, name: str = "a", **fields: object) -> GatherMachine:
    """All ranks of group `name` have asked (calls 1, 2, ...): round 1 has joined."""
    machine = GatherMachine(ReplicaGroup(name, size))
    for rank in range(size):
        machine.ask(ask(rank + 1, rank, step, **fields))
    assert machine.is_joined
    return machine
