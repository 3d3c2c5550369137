"""A job's quorums in the log."""

import logging

from lighthouse.quorum.rules.events import JournalOutdated
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase

log = logging.getLogger(__name__)

NAMES_LOGGED = 16
_WORTH_A_LINE = (QuorumPhase.RECALLED, QuorumPhase.REVOKED, QuorumPhase.STANDING)


def log_quorum(job: str, quorum: Quorum, *, is_new: bool) -> None:
    if not is_new:
        return
    names = [f"{p.replica_id}@{p.step}" for p in quorum.participants]
    more = f" and {len(names) - NAMES_LOGGED} more" if len(names) > NAMES_LOGGED else ""
    log.info("[%s] quorum %d: %s%s", job, quorum.quorum_id, " ".join(names[:NAMES_LOGGED]), more)


def log_order(job: str, order: QuorumOrder) -> None:
    if order.phase in _WORTH_A_LINE:
        reason = f": {order.reason}" if order.reason else ""
        log.info("[%s] quorum %d %s%s", job, order.quorum_id, order.phase, reason)


def log_journal_outdated(job: str, found: JournalOutdated) -> None:
    log.warning(
        "[%s] the journal is older than what was told: %s knows quorum %d, and the last one in the journal is %d. "
        "A copy of an earlier moment was restored, or another lighthouse serves this job. No quorum forms for %.1f s, "
        "until every lease of one that is not in the journal is over; ids go on above all. Make sure that no other "
        "lighthouse serves this job, and restore no copies: without its journal a lighthouse waits just as long",
        job,
        found.replica_id,
        found.seen_id,
        found.last_id,
        found.wait_s,
    )
