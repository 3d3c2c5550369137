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
    """Return the `extra` argument for a logging call that records the event `name`.

    The other arguments are fields of the event. Those that are None are left out, and so are an empty `job`, `run`
    and `replica_group`. `more` are fields that only events of this name have.
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
