"""State machine that starts, stops and restarts the ranks of a replica group on all of its hosts.

This module does no I/O. A *unit* is a set of ranks that restart together: the whole group, or a single rank. An
*attempt* is one start of a unit. The *run* comprises all replica groups in the job.

1. A unit starts when all of its hosts are ready. It restarts when none of its ranks is running any more and its delay
   has passed, if restart_policy.py permits it.
2. A rank that exits with the stop exit code or by SIGINT stops the run for all groups. So does an exhausted restart
   budget, unless the losses occurred because the group does not fit its peers. Then only this group ends.
3. If a host's supervisor is lost, its running ranks are lost, too, and the group waits for the host. A rank also counts
   as lost if its process exists but does nothing, because it is stopped or frozen.
4. If the group must end, or the run is stopped, nothing restarts, and the group ends when its last rank has exited. The
   first reason is kept. Repeated requests can shorten the grace period, but not extend it.
5. Events from earlier attempts are ignored.
6. Once the run is complete, nothing restarts. The group ends with status 0 when its last rank has exited.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lighthouse_protocol.messages.run import SupervisorHeartbeat
from manager.supervisor.rules import events
from manager.supervisor.rules.restart_policy import (
    GROUP_SCOPE,
    Exclude,
    GiveUp,
    Outcome,
    Restart,
    RestartBudget,
    RestartPolicy,
    describe_status,
    outcome,
)

STOPPED_STATUS = 130
STOP_GRACE_S = 1.0  # stopping a run must take less than 2 s


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of ranks over hosts: each host runs `nproc` consecutive ranks."""

    hosts: int = 1
    nproc: int = 1

    @property
    def world_size(self) -> int:
        return self.hosts * self.nproc

    def host_of(self, rank: int) -> int:
        return rank // self.nproc

    def ranks_of(self, host: int) -> tuple[int, ...]:
        return tuple(range(host * self.nproc, (host + 1) * self.nproc))


class Phase(StrEnum):
    WAITING = "waiting"  # its hosts are not ready, or its delay has not passed
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(slots=True)
class Unit:
    """State of a set of ranks that restart together."""

    ranks: tuple[int, ...]
    budget: RestartBudget
    phase: Phase = Phase.WAITING
    attempt: int = -1  # number of the last start, or -1 before the first
    running: set[int] = field(default_factory=set[int])
    started_at: float = 0.0
    starts_at: float = 0.0  # earliest time of the next start
    misfit: str = ""  # why the group does not fit its peers, or an empty string


@dataclass(frozen=True, slots=True)
class _Ending:
    """A requested end of the group."""

    status: int
    why: str
    kill_at: float  # end of the grace period; infinity while the ranks may still complete their step

    @property
    def is_leaving(self) -> bool:
        return self.kill_at == math.inf


class SupervisorMachine:
    """State machine that supervises the ranks of one group.

    Args:
        layout: Distribution of the group's ranks over its hosts.
        policy: The restart policy.
        draw: Returns random numbers from 0 to 1, for the jitter.
        grace_s: Time in seconds between SIGTERM and SIGKILL.
        host_timeout_s: Time in seconds for which the group waits for a missing host.

    All times (`now`) are readings of the caller's monotonic clock, in seconds.
    """

    def __init__(
        self,
        layout: Layout,
        policy: RestartPolicy,
        draw: Callable[[], float],
        *,
        grace_s: float = 10.0,
        host_timeout_s: float = 600.0,
    ) -> None:
        self._layout = layout
        self._policy = policy
        self._grace_s = grace_s
        self._host_timeout_s = host_timeout_s
        every = range(layout.world_size)
        together = [tuple(every)] if policy.scope == GROUP_SCOPE else [(rank,) for rank in every]
        self.units = [Unit(ranks, RestartBudget(policy, draw)) for ranks in together]
        self._unit_of = {rank: unit for unit in self.units for rank in unit.ranks}
        self._ready: set[int] = set()
        self._missing_since: dict[int, float] = {}
        self._ending: _Ending | None = None
        self._completed = ""
        self._effects: list[events.Effect] = []  # effects of the event that is being handled
        self.is_over = False

    def heartbeat(self, now: float) -> SupervisorHeartbeat:
        """Return a heartbeat with the number of restarts so far, and the restart budget closest to its limit."""
        return SupervisorHeartbeat(
            budget_used=max(unit.budget.used(now) for unit in self.units),
            restarts=sum(max(0, unit.attempt) for unit in self.units),
            restarts_left=min(unit.budget.left(now) for unit in self.units),
        )

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(sorted(rank for unit in self.units for rank in unit.running))

    def handle(self, event: events.Event, now: float) -> Sequence[events.Effect]:
        self._effects = []
        if not self.is_over:
            if not self._missing_since and not self._ready:
                self._missing_since = dict.fromkeys(range(self._layout.hosts), now)
            self._dispatch(event, now)
            self._advance(now)
        return self._effects

    def tick(self, now: float) -> Sequence[events.Effect]:
        self._effects = []
        if not self.is_over:
            late = [host for host, since in self._awaited_hosts().items() if now >= since + self._host_timeout_s]
            if late and self._ending is None:
                self._fail(f"host {late[0]} of the group was missing for {self._host_timeout_s:g} s", now)
            self._advance(now)
        return self._effects

    def deadline(self) -> float | None:
        """Return when to call `tick` next, or None if no timer is needed."""
        if self.is_over or self._ending is not None:
            return None
        starts = [unit.starts_at for unit in self.units if unit.phase is Phase.WAITING and self._has_hosts(unit)]
        return min((*starts, *(at + self._host_timeout_s for at in self._awaited_hosts().values())), default=None)

    def _dispatch(self, event: events.Event, now: float) -> None:
        match event:
            case events.HostReady(host):
                self._ready.add(host)
                self._missing_since.pop(host, None)
            case events.HostLost(host, reason):
                self._lose_host(host, reason, now)
            case events.RankEnded():
                self._handle_rank_end(event, now)
            case events.RankSilent():
                self._handle_silent_rank(event, now)
            case events.MisfitReported(reason):
                for unit in self.units:
                    unit.misfit = reason if unit.phase is Phase.RUNNING else ""
            case events.CheckPassed(rank, attempt):
                unit = self._unit_of[rank]
                if attempt == unit.attempt:
                    unit.started_at = now
            case events.CheckFailed(host, reason):
                self._exclude(Exclude(host, f"its health check failed: {reason}"), now)
            case events.RunStopped(reason):
                self._stop(f"the run is stopped: {reason}", now)
            case events.RunCompleted(reason):
                self._completed = reason
            case events.KillAsked(reason):
                self._kill(reason, now)
            case events.EndAsked(status, why, is_leaving, is_urgent, least_s):
                has_grace = self._ending is None or self._ending.is_leaving or not is_urgent
                grace_s = max(self._grace_s, least_s) if has_grace else 0.0
                self._end_group(status, why, math.inf if is_leaving else grace_s, now)

    def _handle_rank_end(self, ended: events.RankEnded, now: float) -> None:
        unit = self._unit_of[ended.rank]
        if ended.attempt != unit.attempt or ended.rank not in unit.running:
            return
        unit.running.discard(ended.rank)
        if self._ending is not None or unit.phase is not Phase.RUNNING:
            return
        cause = ended.cause or unit.misfit
        why = f"rank {ended.rank} died: {describe_status(ended.status)}" + (f": {cause}" if cause else "")
        match outcome(ended.status, self._policy.stop_exit_code):
            case Outcome.DONE:
                unit.phase = unit.phase if unit.running else Phase.DONE
            case Outcome.ABORT:
                self._stop_run(why, now)
            case Outcome.LOST:
                self._handle_loss(unit, self._layout.host_of(ended.rank), why, now)

    def _handle_silent_rank(self, silent: events.RankSilent, now: float) -> None:
        """Handle the loss of a rank whose process still runs."""
        unit = self._unit_of.get(silent.rank)
        if unit is None or silent.rank not in unit.running:
            return
        if self._ending is None and unit.phase is Phase.RUNNING:
            why = f"{silent.reason}; its process is still running"
            self._handle_loss(unit, self._layout.host_of(silent.rank), why, now)

    def _lose_host(self, host: int, reason: str, now: float) -> None:
        self._ready.discard(host)
        self._missing_since.setdefault(host, now)
        for unit in self.units:
            had = unit.running & set(self._layout.ranks_of(host))
            unit.running -= had
            if had and unit.phase is Phase.RUNNING and self._ending is None:
                self._handle_loss(unit, host, f"lost host {host}: {reason}", now)

    def _handle_loss(self, unit: Unit, host: int, why: str, now: float) -> None:
        if self._completed:
            self._log(f"{why}; {self._completed}")
            return
        match unit.budget.record_loss(host, now - unit.started_at, now, is_misfit=bool(unit.misfit)):
            case Restart(after_s):
                unit.starts_at = now + after_s
                who = "the group" if self._policy.scope == GROUP_SCOPE else f"rank {unit.ranks[0]}"
                self._log(f"{why}; {who} restarts in {after_s:.2g} s")
                self._halt(unit, self._grace_s)
            case Exclude() as exclusion:
                self._log(why)
                self._exclude(exclusion, now)
            case GiveUp(reason, is_for_all):
                (self._stop_run if is_for_all else self._fail)(f"{reason}; {why}", now)

    def _kill(self, reason: str, now: float) -> None:
        if self._ending is not None or not self._policy.restart_after_kill:
            self._end_group(1, f"killed: {reason}", 0.0, now)
            return
        self._log(f"killed: {reason}; the ranks restart")
        for unit in self.units:
            if unit.phase is Phase.RUNNING:
                unit.starts_at = now + self._policy.delay_s
                self._halt(unit, 0.0)

    def _stop_run(self, why: str, now: float) -> None:
        self._effects.append(events.RunStopAsked(why))
        self._stop(why, now)

    def _stop(self, why: str, now: float) -> None:
        self._end_group(STOPPED_STATUS, why, min(self._grace_s, STOP_GRACE_S), now)

    def _exclude(self, exclusion: Exclude, now: float) -> None:
        if self._ending is None:
            self._effects.append(events.HostExcluded(exclusion.host, exclusion.reason))
            self._fail(f"host {exclusion.host} is excluded: {exclusion.reason}", now)

    def _fail(self, why: str, now: float) -> None:
        self._end_group(1, why, self._grace_s, now)

    def _end_group(self, status: int, why: str, grace_s: float, now: float) -> None:
        """End the group, or shorten the grace period if it is already ending.

        If the grace period is infinite, the ranks are not stopped yet, so they can complete their step.
        """
        known, kill_at = self._ending, now + grace_s
        if known is None:
            self._ending = _Ending(status, why, kill_at)
            self._log(why, is_asked=status == 0 or math.isinf(grace_s))
        elif kill_at < known.kill_at:
            self._ending = replace(known, kill_at=kill_at)
        else:
            return
        if not self._ending.is_leaving:
            for unit in self.units:
                self._halt(unit, grace_s)

    def _halt(self, unit: Unit, grace_s: float) -> None:
        """Stop the running ranks of a unit. If it is already being stopped, only shorten the grace period."""
        if unit.phase is Phase.RUNNING:
            unit.phase = Phase.STOPPING
        self._effects += [events.Halt(host, ranks, grace_s) for host, ranks in self._by_host(unit.running)]

    def _advance(self, now: float) -> None:
        """Start the units that may start, and check whether the group has ended."""
        for unit in self.units:
            if unit.phase is Phase.STOPPING and not unit.running:
                unit.phase = Phase.WAITING
            if self._completed and not unit.running:
                unit.phase = Phase.DONE
        if self._ending is not None:
            if not self.running:
                self._end_supervision(self._ending.status, self._ending.why)
            return
        if all(unit.phase is Phase.DONE for unit in self.units):
            self._end_supervision(0, self._completed or "all ranks are done")
            return
        for unit in self.units:
            if unit.phase is Phase.WAITING and now >= unit.starts_at and self._has_hosts(unit):
                unit.phase, unit.attempt, unit.started_at = Phase.RUNNING, unit.attempt + 1, now
                unit.running, unit.misfit = set(unit.ranks), ""
                by_host = self._by_host(unit.ranks)
                self._effects += [events.Start(host, ranks, unit.attempt) for host, ranks in by_host]

    def _awaited_hosts(self) -> dict[int, float]:
        """Return the missing hosts that a unit needs for its next start, and since when each is missing."""
        waiting = (unit.ranks for unit in self.units if unit.phase in (Phase.WAITING, Phase.STOPPING))
        needed = {self._layout.host_of(rank) for ranks in waiting for rank in ranks}
        return {host: since for host, since in self._missing_since.items() if host in needed}

    def _has_hosts(self, unit: Unit) -> bool:
        return all(self._layout.host_of(rank) in self._ready for rank in unit.ranks)

    def _by_host(self, ranks: Iterable[int]) -> list[tuple[int, tuple[int, ...]]]:
        among = set(ranks)
        hosts = sorted({self._layout.host_of(rank) for rank in among})
        return [(host, tuple(rank for rank in self._layout.ranks_of(host) if rank in among)) for host in hosts]

    def _end_supervision(self, status: int, why: str) -> None:
        self.is_over = True
        self._effects.append(events.SupervisionEnded(status, why))

    def _log(self, text: str, *, is_asked: bool = False) -> None:
        self._effects.append(events.Logged(text, is_asked))
