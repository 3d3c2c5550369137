"""What a supervisor runs, and the environment that each rank gets. No I/O."""

import itertools
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lighthouse_protocol.identity import supervisor_name
from lighthouse_protocol.limits import DEFAULT_STRIDE, STORE_PORT_OFFSET
from manager.supervisor.rules.machine import Layout

# -- torchrun -----------------------------------------------------------------
#
# torchrun as the command of a supervisor: what can be told from its words. No I/O.
#
# torchrun is one process to the supervisor; the ranks are torchrun's, and only one of the two may restart them.

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)\s*\(pid: (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """`world_size`: None where it is not told by numbers. `master_port`: None where the supervisor chooses it, 0 where
    torchrun does, at each start."""

    max_restarts: str
    world_size: int | None
    master_port: int | None = None


class Failure(NamedTuple):
    """Of one of its ranks, as it says."""

    rank: int
    status: int
    pid: int


def read_torchrun(command: Sequence[str], variables: Mapping[str, str]) -> Torchrun | None:
    """None for another command. `variables`: PET_ and the name of an option stand for that option."""
    is_torchrun = command[0].rpartition("/")[2] == "torchrun"
    is_module = any(a == "-m" and b in _MODULES for a, b in itertools.pairwise(command))
    if not (is_torchrun or is_module):
        return None
    given = {name[4:].lower().replace("_", "-"): value for name, value in variables.items() if name[:4] == "PET_"}
    options = given | _options(command)
    nproc, nnodes = options.get("nproc-per-node", "1"), options.get("nnodes", "1")
    world_size = int(nproc) * int(nnodes) if nproc.isdigit() and nnodes.isdigit() else None
    return Torchrun(options.get("max-restarts", "0"), world_size, _master_port(options))


def failure_behind(status: int, words: Sequence[str]) -> Failure | None:
    """torchrun ends with 1 whatever its rank ended with, and says the rest in words; the first failure comes last."""
    found = _FAILURE.findall("\n".join(words)) if status == 1 else []
    return Failure(*map(int, found[-1])) if found else None


def _master_port(options: Mapping[str, str]) -> int | None:
    if "standalone" in options or options.get("rdzv-backend", "static") != "static":
        return 0
    port = options.get("rdzv-endpoint", "").rpartition(":")[2] or options.get("master-port", "")
    return int(port) if port.isdigit() else None


def _options(command: Sequence[str]) -> dict[str, str]:
    """Of torchrun and of the script; the first one counts."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            found.setdefault(name[2:].replace("_", "-"), value if has_value else following)
    return found


_RANK_COUNTS = {"LIGHTHOUSE_GROUP_RANK": "", "LIGHTHOUSE_GROUP_WORLD_SIZE": ""}
"""An Agent reads these before RANK and WORLD_SIZE: those of another group may be inherited."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`command` of each rank; `torchrun`: that is torchrun, one process on each host. `master` is host and port.

    `stride`, `active` and `min_active` are for wrapped ranks; `slots`: of the whole run. `incarnation` is that of the
    supervisor, and begins those of its ranks: so the lighthouse knows a rank's launch by it. `store_port`: on the
    master host; None: a supervisor serves no store. `keeps_place`: what started the supervisor set RANK and the like.
    `tls_variables`: by which ranks find the files of their own PKI (client_tls.py).
    `run_secret`, `manager_secret`: by these the lighthouse and the manager know the ranks; empty: there is none.
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
    stride: int = DEFAULT_STRIDE
    store_port: int | None = None
    keeps_place: bool = False
    torchrun: Torchrun | None = None
    trace_dir: str | None = None
    tls_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    run_secret: str = field(default="", repr=False)
    manager_secret: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Of this supervisor in its run."""
        return supervisor_name(self.replica_id, self.host, self.layout.hosts)

    @property
    def own_slots(self) -> tuple[int, ...]:
        layout, below = self.layout, self.torchrun
        if below is not None and below.world_size is not None:
            layout = Layout(layout.hosts, below.world_size // layout.hosts)
        return tuple(map(self.slot_of, layout.ranks_of(self.host)))

    def slot_of(self, rank: int) -> int:
        return self.slot_offset + rank

    def process_of(self, rank: int) -> int:
        """The number of the process that it is in: torchrun is one on each host. The first where that is not known."""
        if self.torchrun is None:
            return rank
        return rank * self.layout.hosts // self.torchrun.world_size if self.torchrun.world_size else 0

    def label(self, rank: int) -> str:
        """What stands before each line that the rank writes."""
        return f"{self.replica_id}/{rank}"

    def log_name(self, rank: int, attempt: int) -> str:
        folder = urllib.parse.quote(self.replica_id, safe="@+=")
        folder = folder.replace(".", "%2E") if set(folder) == {"."} else folder  # `..` would leave the log folder
        return f"{folder}/attempt_{attempt}/rank_{rank}.log"

    def environment(self, rank: int, attempt: int, incarnation: str) -> dict[str, str]:
        """torchrun gives its ranks theirs."""
        ours = self._ours(attempt) | self._run(incarnation)
        if self.torchrun is not None:
            return ours | self._torchrun()
        place = self._kept() if self.keeps_place else self._rank(rank, attempt)
        return ours | place | {"LIGHTHOUSE_SLOT": str(self.slot_of(rank))}

    def _ours(self, attempt: int) -> dict[str, str]:
        optional = {
            "LIGHTHOUSE_STORE_PORT": self.store_port,
            "LIGHTHOUSE_TRACE_DIR": self.trace_dir,
            "LIGHTHOUSE_RUN_SECRET": self.run_secret or None,
            "LIGHTHOUSE_MANAGER_SECRET": self.manager_secret or None,
        }
        return {
            "LIGHTHOUSE_MANAGER_ADDRESS": self.manager,
            "REPLICA_GROUP_ID": self.replica_id,
            "LIGHTHOUSE_ADDRESS": self.lighthouse,
            **self.tls_variables,
            "LIGHTHOUSE_JOB": self.job,
            "LIGHTHOUSE_RUN_ID": self.run,
            "LIGHTHOUSE_ATTEMPT": str(attempt),
        } | {name: str(value) for name, value in optional.items() if value is not None}

    def _master(self) -> dict[str, str]:
        return {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}

    def _kept(self) -> dict[str, str]:
        """For what is one of many ranks to its script, and to an Agent a replica group of its own."""
        return self._master() | {"LIGHTHOUSE_GROUP_RANK": "0", "LIGHTHOUSE_GROUP_WORLD_SIZE": "1"}

    def _torchrun(self) -> dict[str, str]:
        """Its workers find their slots from here on. Its own options count before PET_ variables; where a store stands
        elsewhere it may draw a port for its ranks, as two of one host must."""
        master = {f"PET_{name}": value for name, value in self._master().items()}
        is_known = self.store_port == self.master[1] + STORE_PORT_OFFSET
        return {"LIGHTHOUSE_SLOT_OFFSET": str(self.slot_offset)} | _RANK_COUNTS | (master if is_known else {})

    def _rank(self, rank: int, attempt: int) -> dict[str, str]:
        """As torchrun does."""
        return (
            self._master()
            | _RANK_COUNTS
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.layout.world_size),
                "LOCAL_RANK": str(rank % self.layout.nproc),
                "LOCAL_WORLD_SIZE": str(self.layout.nproc),
                "GROUP_RANK": str(self.host),
                "GROUP_WORLD_SIZE": str(self.layout.hosts),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
                "TORCHELASTIC_RUN_ID": self.run,
            }
        )

    def _run(self, incarnation: str) -> dict[str, str]:
        spares = {} if self.active is None else {
            "LIGHTHOUSE_ACTIVE_RANKS": str(self.active),
            "LIGHTHOUSE_MIN_ACTIVE_RANKS": str(self.min_active),
        }  # fmt: skip
        return spares | {
            "LIGHTHOUSE_WORLD_SIZE": str(self.slots),
            "LIGHTHOUSE_INCARNATION": incarnation,
            "LIGHTHOUSE_STRIDE": str(self.stride),
        }
