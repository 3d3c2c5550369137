"""What a lighthouse must not forget, and the narrow interface to where it is kept. Rules:

- One lighthouse has the store at a time. It claims it before it serves, and every claim has a higher term.
- Written on change, never per step, and before it is told: what was told can be read back after any end.
- A quorum_id names one list of one job for ever. A job that has gone quiet is forgotten except for its highest id.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from lighthouse_protocol.messages.membership import Participant, Quorum


@dataclass(frozen=True, slots=True)
class JoinState:
    """The join that a member of the quorum came with; the step that it was assigned may differ. `secret`: the digest of
    its sessions' secret, which is no part of the join."""

    step: int
    tag_quorum_id: int | None
    commit_failures: int
    secret: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class QuorumRecord:
    """What one job's machine must not forget.

    `quorum_id` is the highest ever named, `quorum` the last one formed (None: there is none to go on with).
    `named`: ranges of the ids by which states of this job are named (lineage.py).
    `ended`, `absent`: the job's end, and the groups that come too late for it (job_end.py).
    `entries` by replica_id: what `quorum` was formed from. `lease_s` is the lease it was made under. `secret`: of the
    members of `quorum`, so that a lighthouse that has restarted tells the same.
    """

    quorum_id: int
    quorum: Quorum | None = None
    stands: bool = False
    entries: Mapping[str, JoinState] = field(default_factory=dict[str, JoinState])
    lease_s: float = 0.0
    named: tuple[tuple[int, int], ...] = ()
    ended: int | None = None
    absent: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)


# As tables, the names of the columns first: a column that the reader does not know is skipped, one that it misses has
# its default. Not as messages: nothing that was once admitted is checked again, and the bytes stay those that came.
_ENTRY = tuple(f.name for f in fields(JoinState))
# What a join said of its state (`distrust`) ends with that join.
_PARTICIPANT = tuple(f.name for f in fields(Participant) if f.name not in ("wire", "extras", "distrust"))
_get_entry = attrgetter(*_ENTRY)
_get_participant = attrgetter(*_PARTICIPANT)


def dump(record: QuorumRecord) -> bytes:
    document: dict[str, object] = {
        "quorum_id": record.quorum_id,
        "stands": record.stands,
        "lease_s": record.lease_s,
        "named": record.named,
        "ended": record.ended,
        "absent": record.absent,
        "secret": record.secret,
        "entry": ("replica_id", *_ENTRY),
        "entries": [(replica_id, *_get_entry(entry)) for replica_id, entry in record.entries.items()],
    }
    if record.quorum is not None:
        document["formed_id"] = record.quorum.quorum_id
        document["participant"] = (*_PARTICIPANT, "wire")
        document["participants"] = [
            (*_get_participant(p), base64.b64encode(p.wire).decode()) for p in record.quorum.participants
        ]
    return json.dumps(document, separators=(",", ":")).encode()


def parse(raw: bytes) -> QuorumRecord:
    """The inverse of `dump`. Raises ValueError, TypeError or KeyError for anything else."""
    document = json.loads(raw)
    entries = _rows(document["entry"], document["entries"])
    return QuorumRecord(
        quorum_id=document["quorum_id"],
        quorum=_parse_quorum(document) if "formed_id" in document else None,
        stands=document["stands"],
        entries={row.pop("replica_id"): JoinState(**_known(row, _ENTRY)) for row in entries},
        lease_s=document["lease_s"],
        named=tuple((first, last) for first, last in document["named"]),
        ended=document.get("ended"),
        absent=tuple(document.get("absent", ())),
        secret=document["secret"],
    )


def _parse_quorum(document: dict[str, Any]) -> Quorum:
    rows = _rows(document["participant"], document["participants"])
    participants = [Participant(**_known(row, _PARTICIPANT), wire=base64.b64decode(row["wire"])) for row in rows]
    return Quorum(document["formed_id"], tuple(participants))


def _rows(columns: list[str], rows: list[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _known(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}
