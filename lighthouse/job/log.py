"""Logging for a job's quorums and runs.

The functions log effects of the two state machines. `VerdictLog` logs why no quorum forms.
"""

import logging
from collections.abc import Callable, Mapping

from lighthouse.job import events
from lighthouse.job.forming import QuorumMachine
from lighthouse.job.lineage import EARLIER_COUNTS_FOR_S
from lighthouse.job.records import RunName, Verdict
from lighthouse.job.status import awaited, explain
from lighthouse_protocol.messages.membership import Quorum
from lighthouse_protocol.messages.session import QuorumOrder, QuorumPhase
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.timers import DeadlineTimer

log = logging.getLogger(__name__)


NAMES_LOGGED = 16
WAIT_LOGGED_AFTER_S = 1.0  # normally a quorum forms within milliseconds
_WORTH_A_LINE = (QuorumPhase.RECALLED, QuorumPhase.REVOKED, QuorumPhase.STANDING)


def log_quorum(job: str, quorum: Quorum, *, is_new: bool, is_branch: bool) -> None:
    if not is_new:
        return
    names = [f"{p.replica_id}@{p.step}" for p in quorum.participants]
    more = f" and {len(names) - NAMES_LOGGED} more" if len(names) > NAMES_LOGGED else ""
    step = max(p.step for p in quorum.participants)
    extra = event("quorum_formed", job=job, quorum_id=quorum.quorum_id, step=step, participants=len(names))
    log.info("quorum %d: %s%s", quorum.quorum_id, " ".join(names[:NAMES_LOGGED]), more, extra=extra)
    if is_branch:
        log.warning(
            "quorum %d goes back to step %d: no group that holds the last quorum's state has joined. If one joins "
            "within %g minutes and is still ahead, the others heal from it",
            quorum.quorum_id,
            step,
            EARLIER_COUNTS_FOR_S / 60,
            extra=event("branch_began", job=job, quorum_id=quorum.quorum_id, step=step),
        )


def log_order(job: str, order: QuorumOrder) -> None:
    if order.phase in _WORTH_A_LINE:
        reason = f": {order.reason}" if order.reason else ""
        extra = event(f"quorum_{order.phase}", job=job, quorum_id=order.quorum_id, lost=order.lost or None)
        log.info("quorum %d %s%s", order.quorum_id, order.phase, reason, extra=extra)


def log_end(job: str, end: events.JobEnded) -> None:
    late = f"; absent: {', '.join(end.absent[:NAMES_LOGGED])}" if end.absent else ""
    extra = event("job_ended", job=job, step=end.step)
    log.info("the job ended at step %d: all remaining groups have finished%s", end.step, late, extra=extra)


def log_journal_outdated(job: str, found: events.JournalOutdated) -> None:
    log.warning(
        "the journal is outdated: %s has seen quorum %d, but the newest one in the journal is %d. Either an old copy "
        "was restored, or another lighthouse serves this job. No quorum forms for %.1f s, until all leases "
        "that the journal does not know have expired. Make sure that no other lighthouse serves this job. Do not "
        "restore copies of the journal: a lighthouse without one waits just as long",
        found.replica_id,
        found.seen_id,
        found.last_id,
        found.wait_s,
        extra=event("journal_outdated", job=job, replica_group=found.replica_id, quorum_id=found.seen_id),
    )


def log_cut(job: str, cut: events.ConnectionsCut) -> None:
    names = ", ".join(cut.replica_ids[:NAMES_LOGGED])
    more = f" and {len(cut.replica_ids) - NAMES_LOGGED} more" if len(cut.replica_ids) > NAMES_LOGGED else ""
    log.warning(
        "the connections of %s%s ended at the same moment: probably the network between (a load balancer, a sidecar, a "
        "firewall), not their processes. They have %g s to reconnect before they count as lost",
        names,
        more,
        cut.hold_s,
        extra=event("connections_cut", job=job, participants=len(cut.replica_ids)),
    )


class VerdictLog:
    """Logs why no quorum is forming, once a wait has lasted WAIT_LOGGED_AFTER_S, and again for each new reason.

    Calls `report` with a description of what the pending joins are waiting for, and with "" when the wait ends.
    """

    def __init__(self, job: str, machine: QuorumMachine, timers: Timers, report: Callable[[str], None]) -> None:
        self._job = job
        self._machine = machine
        self._clock = timers.time
        self._report = report
        self._logged: Verdict | None = None
        self._timer = DeadlineTimer(self._log_verdict, timers)

    def update_verdict(self) -> None:
        """Start the log timer if joins are waiting, or cancel it if none are. Call this after each event."""
        if self._machine.decision.verdict in (Verdict.FORMED, Verdict.NO_JOINS):
            self._logged = None
            self.close()
            self._report("")
        elif not self._timer.is_set:
            self._timer.set_after(WAIT_LOGGED_AFTER_S)

    def close(self) -> None:
        self._timer.cancel()

    def _log_verdict(self) -> None:
        verdict = self._machine.decision.verdict
        if verdict is not self._logged:
            self._logged = verdict
            extra = event("no_quorum", job=self._job, verdict=verdict.value)
            log.info("no quorum: %s (%s)", verdict, explain(self._machine, self._clock()), extra=extra)
        self._report(awaited(self._machine))
        self.update_verdict()


def log_effect(name: RunName, effect: events.RunEffect) -> None:
    def fields(kind: str, generation: int | None = None) -> Mapping[str, object]:
        return event(kind, job=name[0], run=name[1], generation=generation)

    match effect:
        case events.GenerationFormed(generation, spares):
            number, active = generation.number, generation.active
            slots = [str(rank.slot) for rank in active[:NAMES_LOGGED]]
            more = " ..." if len(active) > NAMES_LOGGED else ""
            text = "generation %d: slots %s%s; %d spares"
            log.info(text, number, " ".join(slots), more, len(spares), extra=fields("generation_formed", number))
        case events.Interrupted(number, reason, _, is_new=True):
            log.info("generation %d ended: %s", number, reason, extra=fields("generation_over", number))
        case events.RankRefused(rank, error):
            log.info("refused %s: %s", rank, error, extra=fields("rank_refused"))
        case events.Completed(number, _, is_new=True):
            log.info("completed in generation %d", number, extra=fields("run_completed", number))
        case events.Stopped(stop, _, is_new=True):
            log.warning("stopped by %s: %s", stop.who or "the lighthouse", stop.reason, extra=fields("run_stopped"))
        case events.OutsiderIgnored(who, what):
            text = "ignored supervisor %s, which has no rank in run %s and no place in the quorum of job %s: %s"
            log.warning(text, who, name[1], name[0], what, extra=fields("outsider_heard"))
        case events.Resumed():
            log.info("resumed", extra=fields("run_resumed"))
        case _:
            pass
