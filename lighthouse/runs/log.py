"""What happens to a run, in the log."""

import logging

from lighthouse.runs.rules import events
from lighthouse.runs.rules.record import RunName

log = logging.getLogger(__name__)

SLOTS_LOGGED = 16


def log_effect(name: RunName, effect: events.Effect) -> None:
    job, run = name
    match effect:
        case events.GenerationFormed(generation, spares):
            slots = [str(rank.slot) for rank in generation.active[:SLOTS_LOGGED]]
            more = " ..." if len(generation.active) > SLOTS_LOGGED else ""
            log.info(
                "[%s/%s] generation %d: slots %s%s; %d spares",
                job,
                run,
                generation.number,
                " ".join(slots),
                more,
                len(spares),
            )
        case events.Interrupted(number, reason, _, is_new=True):
            log.info("[%s/%s] generation %d is over: %s", job, run, number, reason)
        case events.RankRefused(rank, error):
            log.info("[%s/%s] %s is refused: %s", job, run, rank, error)
        case events.Completed(number, _, is_new=True):
            log.info("[%s/%s] completed by generation %d", job, run, number)
        case events.Stopped(stop, _, is_new=True):
            log.warning("[%s/%s] stopped by %s: %s", job, run, stop.who or "the lighthouse", stop.reason)
        case events.Resumed():
            log.info("[%s/%s] resumed", job, run)
        case _:
            pass
