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
        "quorum %d: %d %s from step %d%s%s",
        now.quorum_id,
        now.replica_world_size,
        "group" if now.replica_world_size == 1 else "groups",
        now.max_step,
        f"; joined: {_named(admitted)}" if admitted else "",
        f"; without: {_named(gone)}" if gone else "",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_LOGGED
    return ", ".join(names[:NAMES_LOGGED]) + (f" and {more} more" if more > 0 else "")
