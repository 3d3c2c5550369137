"""The driver of a run: evidence of its ranks."""

from lighthouse.job.records import Rank
from lighthouse.job.run_driver import ANSWERED_WITHIN_S, OUTSIDE, SILENT, RunEvidence
from lighthouse_protocol.messages.incident import EvidenceAsked, SelfReport
from lighthouse_protocol.messages.run import RankId
from lighthouse_protocol.messages.session import Evidence, EvidenceDone, EvidenceRequest
from tests.virtual_loop import VirtualLoop

RANKS = [Rank(RankId(slot, f"i{slot}"), 0.0, 0.0, host="h", pid=10 + slot) for slot in range(3)]


class Run:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.asked: list[tuple[list[int], EvidenceAsked]] = []
        self.told: list[Evidence | EvidenceDone] = []
        self.evidence = RunEvidence(loop, lambda ranks, asked: self.asked.append(([r.slot for r in ranks], asked)))

    def look(self, *slots: int) -> EvidenceAsked:
        self.evidence.ask_ranks(EvidenceRequest(7, slots), RANKS, self.told.append)
        asked_slots, asked = self.asked.pop()
        assert asked_slots == list(slots or range(3))
        return asked


def test_all_that_answer_are_told_and_then_the_end(loop: VirtualLoop):
    run = Run(loop)
    asked = run.look(0, 2)
    loop.go(1)
    for slot in (0, 1, 2, 2):  # 1 was not asked, 2 says it twice
        run.evidence.add_answer(RANKS[slot].rank, SelfReport(asked.number, f"stacks of {slot}"))
    first, second, done = run.told
    assert isinstance(first, Evidence)
    assert (first.number, first.rank.group_rank, first.rank.pid, first.rank.stacks) == (7, 0, 10, "stacks of 0")
    assert (first.rank.took_s, first.rank.host, first.rank.rank_incarnation) == (1.0, "h", "i0")
    assert isinstance(second, Evidence)
    assert second.rank.stacks == "stacks of 2"
    assert done == EvidenceDone(7)
    assert loop.timers == 0


def test_one_that_says_nothing_is_named(loop: VirtualLoop):
    run = Run(loop)
    asked = run.look()
    run.evidence.add_answer(RANKS[1].rank, SelfReport(asked.number, "stacks"))
    loop.go(ANSWERED_WITHIN_S)
    run.evidence.add_answer(RANKS[0].rank, SelfReport(asked.number, "too late"))
    assert [(e.rank.group_rank, e.rank.missing) for e in run.told if isinstance(e, Evidence)] == [
        (1, (OUTSIDE,)),
        (0, (SILENT,)),
        (2, (SILENT,)),
    ]
    assert run.told[-1] == EvidenceDone(7)


def test_close_ends_what_is_under_way(loop: VirtualLoop):
    run = Run(loop)
    run.look(1)
    run.evidence.end_all_rounds()
    assert [type(told) for told in run.told] == [Evidence, EvidenceDone]
    assert loop.timers == 0
