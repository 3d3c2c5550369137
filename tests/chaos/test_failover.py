"""Two lighthouses on a real etcd, and what happens to them; see failover.py for what is read of it."""

import pytest

from tests.chaos import failover
from tests.etcd_cluster import needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_each_fault_three_times() -> None:
    """The promises about time are for a machine that does nothing else: `python -m tests.chaos.failover`."""
    for cluster in failover.run(3 * len(failover.KINDS), seed=2):
        history = failover.check(cluster)
        assert [fault.name for fault in cluster.faults] == 3 * list(failover.KINDS)
        assert cluster.visits == 5
        lost = [fault for fault in cluster.faults if fault.discards and fault.longest_s <= failover.FAILOVER_S]
        assert not lost, f"a step was lost though nothing took longer than a failover may: {lost}"
        assert len(history.terms) > 10
        assert len(history.lists) > 2 * cluster.visits


def test_a_speaker_that_was_deposed_is_found() -> None:
    def said(*words: tuple[int, int, bool]) -> list[failover.Said]:
        return [failover.Said(at, *word) for at, word in enumerate(words)]

    failover.check_speakers(said((0, 1, True), (0, 1, False), (1, 1, True), (0, 2, True), (0, 2, False)))
    with pytest.raises(AssertionError, match="lighthouse 0 spoke"):
        failover.check_speakers(said((0, 1, True), (1, 1, True), (0, 1, False)))
