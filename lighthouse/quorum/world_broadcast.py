"""Managers are told of the world when it has changed; the log is told which groups wait for missing ranks.

Levels, not edges: a new session is told as soon as it is open, and a burst of changes is told once. Many sessions are
told a few at a time, so that nothing else waits for it, and each the newest that is known then.
"""

import itertools
import logging
from collections.abc import Sequence

from lighthouse.members.rules.events import GridChanged
from lighthouse.members.rules.rank_grid import Grid, grid_of
from lighthouse.quorum.rules.events import Effect, NewcomersChanged, QuorumFormed
from lighthouse.quorum.rules.machine import QuorumMachine
from lighthouse.quorum.sessions import SessionTable
from lighthouse_protocol.messages.membership import MAX_PENDING_NAMED, World
from lighthouse_runtime.log_event import event
from lighthouse_runtime.ports import Timers
from lighthouse_runtime.timing.deadline_timer import DeadlineTimer
from lighthouse_runtime.timing.sustained import Sustained

log = logging.getLogger(__name__)

TOLD_AFTER_S = 0.1
TOLD_AT_ONCE = 50
SESSIONS_LOOKED_AT_PER_S = 5000
# Ranks of one group come one after the other: only a wait that lasts is worth a line.
HELD_BACK_LOGGED_AFTER_S = 10.0


class WorldBroadcast:
    def __init__(self, job: str, machine: QuorumMachine, sessions: SessionTable, timers: Timers) -> None:
        self._job = job
        self._machine = machine
        self._sessions = sessions
        self._behind: dict[int, None] = {}  # sessions that are still to be told the world, in that order
        self._has_grid_changed = False
        self._has_changed = False
        self._clock = timers.time
        self._look_at = 0.0
        self._grid = Grid(())
        self._world: World | None = None
        self._waiting_for = ""
        self._held_back = Sustained(timers, self._log_held_back, self._log_whole, HELD_BACK_LOGGED_AFTER_S)
        self._timer = DeadlineTimer(self._look, timers)

    def opened(self, number: int) -> None:
        """A session."""
        self._behind[number] = None

    def wait(self, waiting_for: str) -> None:
        """What requests for a quorum wait for, now that it lasts; empty: nothing."""
        if waiting_for != self._waiting_for:
            self._waiting_for = waiting_for
            self.wake()

    def read(self, effects: Sequence[Effect]) -> None:
        """What the machine has just done."""
        for effect in effects:
            self._has_grid_changed |= isinstance(effect, GridChanged)
            self._has_changed |= isinstance(effect, GridChanged | NewcomersChanged | QuorumFormed)
        self.wake()

    def wake(self) -> None:
        """Tell soon what is new, if anything is. O(1)."""
        if not self._timer.is_set and (self._behind or self._is_new):
            self._timer.set_after(TOLD_AFTER_S)

    @property
    def _is_new(self) -> bool:
        """Something has changed since the world was looked at."""
        told = self._world.waiting_for if self._world is not None else ""
        return self._has_changed or self._waiting_for != told

    def close(self) -> None:
        self._held_back.close()
        self._timer.cancel()

    def _look(self) -> None:
        if self._world is None or (self._is_new and self._clock() >= self._look_at):
            self._renew()
        for number in list(itertools.islice(self._behind, TOLD_AT_ONCE)):
            del self._behind[number]
            assert self._world is not None
            self._sessions.send(number, self._world)
        self.wake()

    def _renew(self) -> None:
        """A round without newcomers changes nothing of the grid: only the groups that ask are looked at."""
        self._look_at = self._clock() + len(self._sessions) / SESSIONS_LOOKED_AT_PER_S
        has_grid_changed, self._has_grid_changed, self._has_changed = self._has_grid_changed, False, False
        if has_grid_changed:
            self._grid = grid_of(self._machine.roster)
            self._held_back.set(self._grid.explain())
        world = world_of(self._machine, self._grid, self._waiting_for)
        if world.pending and (self._world is None or world.pending != self._world.pending):
            told = event("groups_join", job=self._job, groups=world.peers_pending)
            log.info("waiting to join: %s", world.who_joins, extra=told)
        if world != self._world:
            self._behind |= dict.fromkeys(self._sessions)  # those that wait already stay in front
        self._world = world

    def _log_held_back(self, groups: str) -> None:
        told = event("groups_incomplete", job=self._job)
        log.warning("%s; a replica group joins only when all its ranks are connected", groups, extra=told)

    def _log_whole(self) -> None:
        log.info("all replica groups are complete", extra=event("groups_complete", job=self._job))


def world_of(machine: QuorumMachine, grid: Grid, waiting_for: str = "") -> World:
    """As any group is told it: without its own size."""
    pending = machine.peers_pending
    return World(
        global_world_size=grid.global_world_size,
        largest_peer_group_world_size=grid.largest_peer_group_world_size,
        ranks_pending=grid.ranks_pending,
        peers_pending=pending,
        pending=tuple(machine.joins.list_newcomers()[: min(pending, MAX_PENDING_NAMED)]),
        waiting_for=waiting_for,
    )
