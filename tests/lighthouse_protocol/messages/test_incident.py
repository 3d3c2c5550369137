"""Incidents as documents; as messages they are in wire/test_messages.py."""

import json

import pytest

from lighthouse_protocol.messages.incident import (
    Incident,
    IncidentKind,
    from_document,
    suspects_first,
    to_document,
)
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import INCIDENT_SUMMARY
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
