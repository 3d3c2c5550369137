"""What happens to a run, in the log."""

import logging
from collections.abc import Mapping

from lighthouse.runs.rules import events
from lighthouse.runs.rules.record import RunName
from lighthouse_runtime.log_event import event

log = logging.getLogger(__name__)

SLOTS_LOGGED = 16


def log_effect(name: RunName, effect: events.Effect) -> None:
    def told(kind: str, generation: int | None = None) -> Mapping[str, object]:
        return event(kind, job=name[0], run=name[1], generation=generation)

    match effect:
        case events.GenerationFormed(generation, spares):
            number, active = generation.number, generation.active
            slots = [str(rank.slot) for rank in active[:SLOTS_LOGGED]]
            more = " ..." if len(active) > SLOTS_LOGGED else ""
            text = "generation %d: slots %s%s; %d spares"
            log.info(text, number, " ".join(slots), more, len(spares), extra=told("generation_formed", number))
        case events.Interrupted(number, reason, _, is_new=True):
            log.info("generation %d ended: %s", number, reason, extra=told("generation_over", number))
        case events.RankRefused(rank, error):
            log.info("refused %s: %s", rank, error, extra=told("rank_refused"))
        case events.Completed(number, _, is_new=True):
            log.info("completed in generation %d", number, extra=told("run_completed", number))
        case events.Stopped(stop, _, is_new=True):
            log.warning("stopped by %s: %s", stop.who or "the lighthouse", stop.reason, extra=told("run_stopped"))
        case events.OutsiderHeard(who, what):
            text = "ignored supervisor %s, which has no rank in run %s and no place in the quorum of job %s: %s"
            log.warning(text, who, name[1], name[0], what, extra=told("outsider_heard"))
        case events.Resumed():
            log.info("resumed", extra=told("run_resumed"))
        case _:
            pass
