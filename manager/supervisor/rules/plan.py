"""What a supervisor runs, and the environment that each rank gets. No I/O."""

import urllib.parse
from dataclasses import dataclass

from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.torchrun import Torchrun


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`command` of each rank; `torchrun`: that is torchrun, one process on each host. `master` is host and port.

    `stride`, `active` and `min_active` are for wrapped ranks; `slots`: of the whole run. `incarnation` is that of the
    supervisor, and begins those of its ranks: so the lighthouse knows a rank's launch by it.
    """

    command: tuple[str, ...]
    layout: Layout
    host: int
    replica_id: str
    job: str
    run: str
    incarnation: str
    lighthouse: str
    manager: str
    master: tuple[str, int]
    max_restarts: int
    slot_offset: int = 0
    slots: int = 1
    active: int | None = None
    min_active: int = 1
    stride: int = 100
    torchrun: Torchrun | None = None
    trace_dir: str | None = None

    @property
    def name(self) -> str:
        """Of this supervisor in its run."""
        return self.replica_id if self.layout.hosts == 1 else f"{self.replica_id}/{self.host}"

    @property
    def own_slots(self) -> tuple[int, ...]:
        return tuple(map(self.slot_of, self.layout.ranks_of(self.host)))

    def slot_of(self, rank: int) -> int:
        return self.slot_offset + rank

    def label(self, rank: int) -> str:
        """What stands before each line that the rank writes."""
        return f"{self.replica_id}/{rank}"

    def log_name(self, rank: int, attempt: int) -> str:
        return f"{urllib.parse.quote(self.replica_id, safe='@+=')}/attempt_{attempt}/rank_{rank}.log"

    def environment(self, rank: int, attempt: int, incarnation: str) -> dict[str, str]:
        """torchrun gives its ranks theirs."""
        ours = self._ours(attempt)
        return ours if self.torchrun is not None else ours | self._rank(rank, attempt) | self._slot(rank, incarnation)

    def _ours(self, attempt: int) -> dict[str, str]:
        return {
            "LIGHTHOUSE_MANAGER_ADDRESS": self.manager,
            "REPLICA_GROUP_ID": self.replica_id,
            "LIGHTHOUSE_ADDRESS": self.lighthouse,
            "LIGHTHOUSE_JOB": self.job,
            "LIGHTHOUSE_RUN_ID": self.run,
            "LIGHTHOUSE_ATTEMPT": str(attempt),
        } | ({"LIGHTHOUSE_TRACE_DIR": self.trace_dir} if self.trace_dir is not None else {})

    def _rank(self, rank: int, attempt: int) -> dict[str, str]:
        """As torchrun does."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.layout.world_size),
            "LOCAL_RANK": str(rank % self.layout.nproc),
            "LOCAL_WORLD_SIZE": str(self.layout.nproc),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(self.layout.hosts),
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run,
        }

    def _slot(self, rank: int, incarnation: str) -> dict[str, str]:
        spares = {} if self.active is None else {
            "LIGHTHOUSE_ACTIVE_RANKS": str(self.active),
            "LIGHTHOUSE_MIN_ACTIVE_RANKS": str(self.min_active),
        }  # fmt: skip
        return spares | {
            "LIGHTHOUSE_SLOT": str(self.slot_of(rank)),
            "LIGHTHOUSE_WORLD_SIZE": str(self.slots),
            "LIGHTHOUSE_INCARNATION": incarnation,
            "LIGHTHOUSE_STRIDE": str(self.stride),
        }
