"""The one snapshot of a run that CLI, page and metrics show."""

from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.ranks import Rank
from lighthouse.runs.rules.record import RunName, SavedRun
from lighthouse_protocol.messages.run_status import RankState, RankStatus, RunStatus, SupervisorStatus


def run_status(name: RunName, machine: RunMachine, now: float) -> RunStatus:
    """O(n log n): for a person or a scrape."""
    generations = machine.generations
    return RunStatus(
        job=name[0],
        run=name[1],
        verdict=machine.verdict(now).value,
        counters=generations.restarts.counters,
        terms=generations.terms,
        slots=tuple(generations.current.slots),
        is_complete=machine.completed is not None,
        stop=machine.stop,
        ranks=tuple(_rank(rank, machine, now) for rank in sorted(generations.ranks, key=lambda rank: rank.rank)),
        supervisors=tuple(
            SupervisorStatus(each.entry.name, each.entry.host, each.entry.slots, each.session is not None)
            for each in sorted(machine.supervisors, key=lambda each: each.entry.name)
        ),
        excluded=machine.supervisors.excluded,
    )


def saved_run_status(name: RunName, saved: SavedRun) -> RunStatus:
    """Of a run without processes at present."""
    machine = RunMachine(record=saved.record)
    ranks = machine.generations.ranks
    for rank in ranks.here:
        ranks.lose(rank)
    return run_status(name, machine, 0.0)


def _rank(rank: Rank, machine: RunMachine, now: float) -> RankStatus:
    generation = machine.generations.current.generation
    return RankStatus(
        slot=rank.rank.slot,
        incarnation=rank.rank.incarnation,
        state=_state(rank, machine),
        rank=None if generation is None else generation.place(rank.rank),
        generation=rank.generation,
        step=rank.step,
        phase=rank.phase,
        beat_age_s=max(0.0, now - rank.seen_at),
        attempt=rank.attempt,
        host=rank.host,
        pid=rank.pid,
    )


def _state(rank: Rank, machine: RunMachine) -> RankState:
    current = machine.generations.current
    if rank.rank in current.finished:
        return RankState.FINISHED
    if not rank.is_here:
        return RankState.LOST
    if rank.rank in current.running:
        return RankState.ACTIVE
    if not rank.is_ready:
        return RankState.STARTING
    return RankState.SPARE if current.stands else RankState.READY
