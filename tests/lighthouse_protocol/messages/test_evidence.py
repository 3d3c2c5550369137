"""Evidence is bounded, whatever a rank has to say."""

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.incident import (
    MAX_FLIGHT_RECORDER_BYTES,
    MAX_MISSING,
    MAX_STACKS_BYTES,
    RankEvidence,
    cut_middle,
    fit_evidence,
)
from lighthouse_protocol.wire.codec import RANK_EVIDENCE

HUGE = "gr\u00f6\u00dfer\ud800\n" * 100_000
WHOLE = RankEvidence(3, "w", 7, "node-1", "stack", "[]", "State: R", ("a", "b"), ("x",), 0.5)


class TestBounds:
    def test_what_fits_stays_as_it_is(self):
        assert fit_evidence(WHOLE) == WHOLE
        assert RANK_EVIDENCE.read(RANK_EVIDENCE.write(WHOLE)) == WHOLE

    def test_a_rank_that_says_far_too_much_takes_64_kib(self):
        much = RankEvidence(3, "w", 7, "h", HUGE, HUGE, HUGE, (HUGE,) * 99, (HUGE,) * 99, 1.0)
        message = RANK_EVIDENCE.write(much)
        assert message.ByteSize() <= 64 * 1024 < MAX_REQUEST_BYTES
        read = RANK_EVIDENCE.read(message)
        assert read == RANK_EVIDENCE.read(RANK_EVIDENCE.write(read)), "cut once, it fits"

    def test_a_group_of_very_many_ranks_takes_8_mib(self):
        much = RankEvidence(3, "w", 7, "h", HUGE, "[]", HUGE, (HUGE,) * 99, (), 1.0)
        assert 16384 * RANK_EVIDENCE.write(fit_evidence(much, 16384)).ByteSize() <= 8 * 1024 * 1024

    def test_json_is_whole_or_not_there(self):
        read = fit_evidence(RankEvidence(0, flight_recorder="[" + "1," * MAX_FLIGHT_RECORDER_BYTES + "1]"))
        assert read.flight_recorder == ""
        assert read.missing == (f"Flight Recorder: {2 * MAX_FLIGHT_RECORDER_BYTES + 3} bytes; 12288 are taken",)

    def test_the_last_lines_are_kept(self):
        lines = tuple(f"{n} {'x' * 235}" for n in range(99))
        assert fit_evidence(RankEvidence(0, output=lines)).output == lines[-32:]

    def test_reasons_are_few(self):
        assert len(fit_evidence(RankEvidence(0, missing=("why",) * 99)).missing) == MAX_MISSING

    def test_the_beginning_and_the_end_of_stacks(self):
        """The newest thread is first, the main one last."""
        stacks = "newest\n" + "x" * MAX_STACKS_BYTES + "\nmain"
        cut = cut_middle(stacks, MAX_STACKS_BYTES)
        assert cut.startswith("newest\n")
        assert cut.endswith("\nmain")
        assert "bytes and more are left out" in cut
        assert len(cut.encode()) <= MAX_STACKS_BYTES
