"""An incident of a run, as people see it beside the stalls and losses of the job."""

from lighthouse.runs.rules.record import RestartRecord, RunName
from lighthouse_protocol.messages.evidence import RankEvidence
from lighthouse_protocol.messages.incident import Incident, IncidentKind, IncidentSummary, MemberEvidence


def incident_of(name: RunName, restart: RestartRecord) -> Incident:
    """Its ranks are named run/slot."""
    job, run = name
    kind = IncidentKind.EXIT if restart.ends_nothing else IncidentKind.RESTART
    formed_s = _since(restart, restart.formed_at)
    at = f"run {run}" if restart.ends_nothing else f"run {run}, generation {restart.generation}"
    summary = IncidentSummary(
        restart.incident,
        job,
        kind,
        f"{at}: {restart.cause}",
        tuple(f"{run}/{rank.slot}" for rank in restart.lost),
        opened_unix_s=restart.noticed_at,
        noticed_s=0.0,
        quorum_s=formed_s,
        quorum_id=restart.formed or 0,
        step_s=_since(restart, restart.stepped_at),
        over_s=0.0 if restart.ends_nothing else formed_s,
    )
    return Incident(
        summary,
        tuple(
            MemberEvidence(
                run,
                RankEvidence(
                    process.rank.slot,
                    rank_incarnation=process.rank.incarnation,
                    process=f"ended: {process.reason}",
                    output=process.output,
                ),
            )
            for process in restart.evidence
        ),
    )


def _since(restart: RestartRecord, at: float | None) -> float | None:
    """The wall clock may have been set back since."""
    return None if at is None else max(0.0, at - restart.noticed_at)
