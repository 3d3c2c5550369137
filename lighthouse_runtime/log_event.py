"""What a line of the log is about, for programs: its fields.

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
    """What a line is about, as the `extra` of a call. `name` says what happened, from a closed set; the fields that
    all lines share have one name each, and `more` are those of this event alone. What is empty or None is left out."""
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
