"""A job's quorums in the log."""

import logging

from protos.membership import Quorum
from protos.session import Order, Phase

log = logging.getLogger(__name__)

NAMES_LOGGED = 16
_WORTH_A_LINE = (Phase.RECALLED, Phase.REVOKED, Phase.STANDING)


def log_quorum(job: str, quorum: Quorum, *, is_new: bool) -> None:
    if not is_new:
        return
    names = [f"{p.replica_id}@{p.step}" for p in quorum.participants]
    more = f" and {len(names) - NAMES_LOGGED} more" if len(names) > NAMES_LOGGED else ""
    log.info("[%s] quorum %d: %s%s", job, quorum.quorum_id, " ".join(names[:NAMES_LOGGED]), more)


def log_order(job: str, order: Order) -> None:
    if order.phase in _WORTH_A_LINE:
        reason = f": {order.reason}" if order.reason else ""
        log.info("[%s] quorum %d %s%s", job, order.quorum_id, order.phase, reason)
