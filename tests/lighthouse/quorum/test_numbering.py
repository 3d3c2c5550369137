"""Which ids were given out in this life, and which before it."""

from lighthouse.job.lineage import Numbering
from lighthouse.job.records import QuorumRecord


def test_an_id_that_was_told_is_known_if_it_was_written_down_or_given_out_here():
    numbering = Numbering(100, QuorumRecord(50))
    assert numbering.is_unknown(51)
    assert numbering.number([], 0, are_same=False, always=True)
    assert numbering.number([], 0, are_same=False, always=True)
    assert numbering.quorum_id == 101
    known = {seen_id: not numbering.is_unknown(seen_id) for seen_id in (1, 50, 51, 99, 100, 101, 102)}
    assert known == {1: True, 50: True, 51: False, 99: False, 100: True, 101: True, 102: False}
