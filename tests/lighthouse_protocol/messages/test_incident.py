"""Incidents as documents, and bounded evidence. As messages they are in wire/test_messages.py."""

import json

import pytest

from lighthouse_protocol.limits import MAX_REQUEST_BYTES
from lighthouse_protocol.messages.incident import (
    MAX_FLIGHT_RECORDER_BYTES,
    MAX_MISSING,
    MAX_STACKS_BYTES,
    Incident,
    IncidentKind,
    RankEvidence,
    cut_middle,
    fit_evidence,
    from_document,
    suspects_first,
    to_document,
)
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import INCIDENT_SUMMARY, RANK_EVIDENCE
from tests.lighthouse.evidence import member, summary

FULL = Incident(
    summary(evidence_s=64.0, acted_s=64.1, action="x", quorum_s=66.0, quorum_id=18, step_s=70.0, over_s=65.0),
    (member("b/1", missing=("output: none",)), member("a/0", stacks="")),
    ("c: it holds no session",),
)
SPARE = Incident(summary(kind=IncidentKind.LOSS, suspects=(), step_s=0.0))


@pytest.mark.parametrize("incident", [FULL, SPARE])
def test_there_and_back(incident: Incident):
    assert from_document(json.loads(json.dumps(to_document(incident)))) == incident


def test_a_document_of_a_later_version_is_read():
    evidence = [one | {"more": 1} for one in to_document(FULL)["evidence"]]
    assert from_document(to_document(FULL) | {"more": 1, "evidence": evidence}) == FULL


@pytest.mark.parametrize("field", ["id", "kind", "suspects", "evidence", "missing", "noticed_s"])
def test_what_is_no_incident_is_not_read(field: str):
    document = to_document(FULL)
    del document[field]
    with pytest.raises((KeyError, TypeError)):
        from_document(document)


def test_an_unknown_kind_is_named():
    message = INCIDENT_SUMMARY.write(FULL.summary)
    message.kind = "flood"
    with pytest.raises(InvalidRequest, match="kind: is 'flood'; this version knows stall, loss"):
        INCIDENT_SUMMARY.read(message)


def test_the_suspects_come_first():
    given = [member("a/10"), member("b/1"), member("a/9")]
    assert [one.name for one in suspects_first(given, ["b/1"])] == ["b/1", "a/9", "a/10"]


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
