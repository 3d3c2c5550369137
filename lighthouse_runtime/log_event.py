"""Structured fields for log lines.

Usage:

log.info("quorum %d: %s", quorum_id, names, extra=event("quorum_formed", job=job, quorum_id=quorum_id))
"""

from collections.abc import Mapping


def event(
    name: str,
    *,
    job: str = "",
    run: str = "",
    replica_group: str = "",
    rank: int | None = None,
    quorum_id: int | None = None,
    generation: int | None = None,
    step: int | None = None,
    **more: object,
) -> Mapping[str, object]:
    """Return the `extra` argument of a logging call.

    Fields that are None are left out, and so are an empty `job`, `run` and `replica_group`. `name` is one of a
    fixed set. `more` are fields of this event only; the other fields are shared by many events.
    """
    shared = {
        "job": job or None,
        "run": run or None,
        "replica_group": replica_group or None,
        "rank": rank,
        "quorum_id": quorum_id,
        "generation": generation,
        "step": step,
    }
    return {"event": name, "fields": {key: value for key, value in (shared | more).items() if value is not None}}
