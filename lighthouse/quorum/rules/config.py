"""What a job's machine is told once."""

from dataclasses import dataclass

from lighthouse_protocol.limits import JOIN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """`first_quorum_id` must be above every id that this job was ever told. `stands`: quorums may stand.

    `last_call_s`: how long a lost member may take to be back before a spare is spent in its place; 0: it is at once.
    """

    min_replicas: int = 1
    join_timeout_s: float = JOIN_TIMEOUT_S
    heartbeat_timeout_s: float = 5.0
    deadline_margin_s: float = 1.0
    allowed_sizes: frozenset[int] = frozenset()
    active: int | None = None
    allow_heterogeneous: bool = False
    max_replicas: int = 10_000
    first_quorum_id: int = 1
    lease_s: float = 5.0
    stands: bool = True
    last_call_s: float = 0.0
