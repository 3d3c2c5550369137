"""Which of the candidates a quorum takes, where its size is limited (--allowed-replicas, --active-replicas).

Members of the previous quorum first, an up-to-date one at their head, then those that wait longest.
"""

from collections.abc import Sequence, Set

from lighthouse_protocol.messages.membership import Participant


def size_for(candidates: int, allowed_sizes: Set[int], active: int | None) -> int:
    """The largest allowed size of a quorum with this number of candidates; 0: none."""
    most = min(candidates, active) if active is not None else candidates
    if not allowed_sizes:
        return most
    return max((size for size in allowed_sizes if size <= most), default=0)


def choose(
    candidates: Sequence[Participant], previous: Set[str], size: int, foreign: Set[str] = frozenset()
) -> list[Participant]:
    """`candidates` in the order in which they came; `previous` the replica_ids of the last quorum.

    `foreign`: those that are to heal, whatever their step (lineage.py).
    """
    if len(candidates) <= size:
        return list(candidates)
    members = [c for c in candidates if c.replica_id in previous]
    members.sort(key=lambda c: (c.replica_id in foreign, -c.step))
    newcomers = [c for c in candidates if c.replica_id not in previous]
    return (members + newcomers)[:size]
