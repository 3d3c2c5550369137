import json
import sys
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.job.records import (
    JoinState,
    QuorumRecord,
    Rank,
    RunRecord,
    dump_quorum,
    dump_run,
    parse_quorum,
    parse_run,
)
from lighthouse.job.store import MemoryStore, RecordStore
from lighthouse_protocol.messages.membership import Participant, Quorum
from lighthouse_protocol.messages.run import RankId

# Every field by its type: one that is added is drawn from then on. `distrust` ends with its join, and is not kept.
KEPT = {name: kind for name, kind in get_type_hints(Participant).items() if name != "distrust"}
PARTICIPANTS = st.builds(Participant, **{name: st.from_type(kind) for name, kind in KEPT.items()})
QUORUMS = st.builds(Quorum, st.integers(0, 2**53 - 1), st.lists(PARTICIPANTS, max_size=4).map(tuple))
ENTRIES = st.dictionaries(st.text(), st.builds(JoinState), max_size=4)
RECORDS = st.builds(
    QuorumRecord,
    st.integers(0, 2**53 - 1),
    st.none() | QUORUMS,
    st.booleans(),
    ENTRIES,
    st.floats(0, allow_nan=False, allow_infinity=False),
    ended=st.none() | st.integers(0, 2**53 - 1),
    absent=st.lists(st.text(), max_size=3).map(tuple),
)


def wires(record: QuorumRecord) -> list[bytes]:
    return [p.wire for p in record.quorum.participants] if record.quorum else []


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: QuorumRecord) -> None:
    back = parse_quorum(dump_quorum(record))
    assert back == record
    assert wires(back) == wires(record)  # Participant does not compare these


FULL = QuorumRecord(
    7, Quorum(7, (Participant("a", step=3, wire=b"\x00\xff"),)), True, {"a": JoinState(2, None, 1)}, 9.5
)


def test_what_another_version_wrote_beside_is_skipped() -> None:
    document: dict[str, Any] = json.loads(dump_quorum(FULL))
    document["generation"] = 12
    for columns, rows in (("participant", "participants"), ("entry", "entries")):
        document[columns].insert(1, "of_tomorrow")
        for row in document[rows]:
            row.insert(1, "?")
    assert parse_quorum(json.dumps(document).encode()) == FULL


def test_what_another_version_did_not_know_has_its_default() -> None:
    document: dict[str, Any] = json.loads(dump_quorum(FULL))
    column = document["participant"].index("commit_failures")
    for row in (document["participant"], *document["participants"]):
        del row[column]
    assert parse_quorum(json.dumps(document).encode()) == FULL


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b'{"entry": 1}', b"\xff", dump_quorum(FULL)[:-1]])
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_quorum(raw)


def test_no_memory_keeps_nothing() -> None:
    memory: RecordStore = MemoryStore()
    assert memory.claim() == 0
    memory.commit("job", FULL)
    assert memory.load() == {}
    assert memory.last_id("job") == 0
    memory.forget("job")
    memory.release()


def test_no_function_is_called_for_a_plain_value_of_a_run() -> None:
    """A start reads hundreds of runs with thousands of ranks; calls for each value took 80 ms for a thousand ranks."""
    record = RunRecord(ranks=tuple(Rank(RankId(slot, f"i.{slot}"), 1.0, host="h", pid=slot) for slot in range(100)))
    raw, calls = dump_run(record), 0
    assert parse_run(raw) == record

    def count(frame: object, what: str, of: object) -> None:
        nonlocal calls
        calls += what == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        parse_run(raw)
    finally:
        sys.setprofile(before)
    assert calls < 10 * len(record.ranks)
