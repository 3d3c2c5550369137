"""Logs a new quorum: which groups were admitted, and which are gone."""

import logging
from collections.abc import Sequence

from lighthouse_protocol.messages.membership import Assignment

log = logging.getLogger(__name__)

NAMES_LOGGED = 16


def log_quorum(before: Assignment | None, now: Assignment) -> None:
    """Log `now` unless it is the same quorum as `before`."""
    if before is not None and before.quorum_id == now.quorum_id:
        return
    known = frozenset(before.replica_ids if before is not None else now.replica_ids)
    admitted = [name for name in now.replica_ids if name not in known]
    gone = sorted(known - frozenset(now.replica_ids))
    log.info(
        "quorum %d from step %d on, with %d in it%s%s",
        now.quorum_id,
        now.max_step,
        now.replica_world_size,
        f"; admitted: {_named(admitted)}" if admitted else "",
        f"; gone: {_named(gone)}" if gone else "",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_LOGGED
    return ", ".join(names[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")
