"""The pseudo code of the documents 000 and 002, runnable: what it says, on clocks and a store that can fail.

Blocking waits are polled. Where the text leaves something open, the kinder reading is taken: ranks ping each second,
and a living coordinator keeps its heartbeat fresh between two advances.
"""

from dataclasses import dataclass, field

ALIVE_S = 30.0
TIMEOUT_S = 60.0


class StoreGone(Exception):
    """The TCPStore has died with the host of rank 0."""


@dataclass
class Store:
    """What the pseudo code keeps in the TCPStore."""

    global_iteration: int = 0
    arrived: set[int] = field(default_factory=set[int])
    heartbeats: dict[int, float] = field(default_factory=dict[int, float])
    coordinator: int = 0
    coordinator_heartbeat: float = 0.0
    elections: int = 0
    job_restarts: int = 0
    keys: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class DocumentRank:
    rank: int
    iteration: int = 0
    is_alive: bool = True
    waits_since: float | None = None
    expects: int = 0
    is_coordinator: bool = False


class DocumentRun:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.now = 0.0
        self._store: Store | None = Store()
        self._skews: dict[int, float] = {}
        self._ranks: dict[int, DocumentRank] = {}

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StoreGone
        return self._store

    # -- what happens to it

    def start(self, *slots: int, environment: bool = True) -> None:
        for slot in slots:
            rank = slot if environment else 0  # int(os.environ.get("RANK", 0))
            self._ranks[slot] = DocumentRank(rank, self.store.global_iteration)
        self._ping()

    def skew(self, slot: int, by_s: float) -> None:
        """That host's wall clock is off."""
        self._skews[slot] = by_s
        self.store.heartbeats[self._ranks[slot].rank] = self._clock(slot)

    def kill(self, *slots: int) -> None:
        for slot in slots:
            self._ranks[slot].is_alive = False
            self._ranks[slot].waits_since = None

    def kill_host_of_rank_0(self) -> None:
        self.kill(0)
        self._store = None

    def lose_coordination(self) -> None:
        self._store = None

    def restart(self, slot: int) -> None:
        """handle_rank_restart()"""
        self._ranks[slot] = rank = DocumentRank(slot)
        rank.iteration = self.store.global_iteration
        if self._clock(slot) - self.store.heartbeats.get(slot, -1e9) > ALIVE_S:
            self.ready(slot)

    def ready(self, *slots: int) -> None:
        """state.advance()"""
        for slot in slots:
            rank = self._ranks[slot]
            try:
                self._arrive(slot, rank)
            except StoreGone:
                rank.iteration += 1  # "fallback to local iteration if coordination fails"
        self._poll()

    def restart_in_process(self) -> None:
        """Local: self.iteration += 1."""
        for rank in self._ranks.values():
            rank.iteration += 1

    def restart_processes(self) -> None:
        """Shared: global_iteration_counter += 100."""
        self.store.global_iteration += 100
        for rank in self._ranks.values():
            rank.iteration = self.store.global_iteration

    def put(self, slot: int, key: str, value: str) -> None:
        self.store.keys[key] = value

    def get(self, slot: int, key: str) -> str | None:
        return self._store.keys.get(key) if self._store is not None else None

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            if self._store is not None:
                self._ping()
                self._poll()

    # -- what is seen of it

    def number(self, slot: int) -> int:
        return self._ranks[slot].iteration

    @property
    def job_restarts(self) -> int:
        return self.store.job_restarts

    # -- the pseudo code

    def _clock(self, slot: int) -> float:
        return self.now + self._skews.get(slot, 0.0)

    def _ping(self) -> None:
        for slot, rank in self._ranks.items():
            if rank.is_alive:
                self.store.heartbeats[rank.rank] = self._clock(slot)
                if rank.rank == self.store.coordinator:
                    self.store.coordinator_heartbeat = self._clock(slot)

    def _active_ranks(self, slot: int) -> set[int]:
        now = self._clock(slot)
        active = {rank for rank, at in self.store.heartbeats.items() if now - at < ALIVE_S}
        return active | {0}

    def _arrive(self, slot: int, rank: DocumentRank) -> None:
        self.store.arrived.add(rank.rank)
        if len(self.store.arrived) == self.world_size:
            self.store.job_restarts += 1
        coordinator = self.store.coordinator
        if self._clock(slot) - self.store.coordinator_heartbeat >= ALIVE_S:
            coordinator = self._elect(slot, rank)
        rank.is_coordinator = rank.rank == coordinator
        rank.waits_since, rank.expects = self.now, self.store.global_iteration + 1

    def _elect(self, slot: int, rank: DocumentRank) -> int:
        self.store.elections += 1
        elected = rank.rank if self.store.elections == 1 else min(self._active_ranks(slot))
        self.store.coordinator = elected
        return elected

    def _poll(self) -> None:
        for slot, rank in self._ranks.items():
            if rank.is_alive and rank.waits_since is not None and rank.is_coordinator:
                self._coordinate(slot, rank, rank.waits_since)
        for rank in self._ranks.values():
            if rank.is_alive and rank.waits_since is not None and self.store.global_iteration == rank.expects:
                rank.iteration, rank.waits_since = rank.expects, None

    def _coordinate(self, slot: int, rank: DocumentRank, since: float) -> None:
        active = self._active_ranks(slot)
        arrived = len(self.store.arrived & active)
        is_late = self.now - since >= TIMEOUT_S
        if arrived >= len(active) or (is_late and arrived >= max(1, len(active) // 2)):
            self.store.global_iteration += 1
