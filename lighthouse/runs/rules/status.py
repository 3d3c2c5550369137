"""The one snapshot of a run that CLI, page and metrics show."""

from dataclasses import replace

from lighthouse.members.rules.run_rank import RunRank
from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.ranks import Rank
from lighthouse.runs.rules.record import RunName, SavedRun
from lighthouse_protocol.messages.progress import STEP, OpenPhase, ProgressSample, RankName, RankView
from lighthouse_protocol.messages.run_status import RankState, RankStatus, RunStatus, SupervisorStatus
from lighthouse_protocol.messages.status import RankState as PlaceState
from lighthouse_protocol.rules.proof import short_name
from lighthouse_protocol.rules.stall import FIRST_S

_WAITS = {RankState.READY: "the next generation", RankState.FINISHED: "the other ranks to finish"}


def run_status(name: RunName, machine: RunMachine, now: float) -> RunStatus:
    """O(n log n): for a person or a scrape."""
    generations = machine.generations
    generation = generations.current.generation
    places = {rank: place for place, rank in enumerate(generation.active if generation else ())}
    heard = {view.name.group_rank: view.sample.step for view in generations.progress.ranks(now)}
    return RunStatus(
        job=name[0],
        run=name[1],
        verdict=machine.verdict(now).value,
        counters=generations.restarts.counters,
        terms=generations.terms,
        slots=tuple(generations.current.slots),
        is_complete=machine.completed is not None,
        stop=machine.stop,
        ranks=tuple(
            _rank(rank, places.get(rank.rank), heard.get(rank.rank.slot, rank.step), _state(rank, machine), now)
            for rank in sorted(generations.ranks, key=lambda rank: rank.rank)
        ),
        supervisors=tuple(
            SupervisorStatus(each.entry.name, each.entry.host, each.entry.slots, each.session is not None, each.last)
            for each in sorted(machine.supervisors, key=lambda each: each.entry.name)
        ),
        excluded=machine.supervisors.excluded,
        budget_used=max(
            machine.supervisors.budget_used, generations.budget.used(generations.terms, generations.wall(now))
        ),
    )


def saved_run_status(name: RunName, saved: SavedRun) -> RunStatus:
    """Of a run without processes at present."""
    machine = RunMachine(record=saved.record)
    ranks = machine.generations.ranks
    for rank in ranks.here:
        ranks.lose(rank)
    return run_status(name, machine, 0.0)


def run_ranks(machine: RunMachine, now: float) -> tuple[RunRank, ...]:
    """As they stand beside the ranks of replica groups; without those that have finished and ended."""
    heard = {view.name.group_rank: view for view in machine.generations.progress.ranks(now)}
    current = machine.generations.current
    found: list[RunRank] = []
    for rank in machine.generations.ranks:
        state = _state(rank, machine)
        if state is RankState.FINISHED and not rank.is_here:
            continue
        shown = {RankState.LOST: PlaceState.LOST, RankState.SPARE: PlaceState.SPARE}.get(state)
        is_bare = machine.generations.terms.is_elastic  # its ranks are launchers of what trains, and never move
        is_judged = shown is None and rank.rank in current.active and not current.is_broken and not is_bare
        view = heard.get(rank.rank.slot)
        if view is None or state is not RankState.ACTIVE:
            view = _idle(RankName(machine.config.run, rank.rank.slot), rank, view, state, now)
        found.append(RunRank(view, rank.generation, shown, is_judged))
    return tuple(found)


def _idle(name: RankName, rank: Rank, heard: RankView | None, state: RankState, now: float) -> RankView:
    """Of one that does not say where it is: it runs nothing, or has just begun, and nothing is expected of it for long.
    What it has said last still ages."""
    beat_age_s, limit_s, waits_for = max(0.0, now - rank.seen_at), FIRST_S, _WAITS.get(state, "")
    phase = rank.phase if state is RankState.STARTING and rank.phase else STEP
    sample = ProgressSample(rank.step, (OpenPhase(phase),), waits_for=waits_for)
    if heard is not None:
        still_s = max(0.0, heard.progress_age_s - beat_age_s)
        sample, limit_s = replace(heard.sample, still_s=still_s, waits_for=waits_for), heard.limit_s
    return RankView(name, sample, limit_s, beat_age_s, rank.rank.incarnation, rank.host, rank.pid)


def _rank(rank: Rank, place: int | None, step: int, state: RankState, now: float) -> RankStatus:
    return RankStatus(
        slot=rank.rank.slot,
        start=short_name(rank.rank.incarnation),
        state=state,
        rank=place,
        generation=rank.generation,
        step=step,
        phase=rank.phase,
        beat_age_s=max(0.0, now - rank.seen_at),
        attempt=rank.attempt,
        host=rank.host,
        pid=rank.pid,
    )


def _state(rank: Rank, machine: RunMachine) -> RankState:
    current = machine.generations.current
    if rank.rank in current.finished and not rank.is_ready:
        return RankState.FINISHED
    if not rank.is_here:
        return RankState.LOST
    if rank.rank in current.running:
        return RankState.ACTIVE
    if not rank.is_ready:
        return RankState.STARTING
    return RankState.SPARE if current.stands else RankState.READY
