"""Launch plan: the command that a supervisor runs, and the environment of each rank. This module does no I/O.

If the command is torchrun, the supervisor starts one torchrun process per host, which starts the ranks.
`read_torchrun` parses the options of torchrun that the supervisor needs.
"""

import itertools
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lighthouse_protocol.identity import supervisor_name
from lighthouse_protocol.limits import DEFAULT_STRIDE, STORE_PORT_OFFSET
from manager.supervisor.rules.machine import Layout

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)\s*\(pid: (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """The options of a torchrun command line that the supervisor needs."""

    max_restarts: str  # must be "0", because only the supervisor restarts ranks
    world_size: int | None  # None if unknown, because the options are not numbers
    master_port: int | None = None  # None if the supervisor chooses it, 0 if torchrun chooses one at each start


class Failure(NamedTuple):
    """Failure of one of torchrun's ranks, as torchrun reports it in its output."""

    rank: int
    status: int
    pid: int


def read_torchrun(command: Sequence[str], variables: Mapping[str, str]) -> Torchrun | None:
    """Parse a torchrun command line, or return None for other commands.

    torchrun reads defaults from the environment `variables` (PET_ plus the option's name).
    """
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
    """Return the rank failure that made torchrun exit, or None if its output does not contain one.

    `status` is torchrun's exit status, and `words` are the last lines of its output. torchrun exits with code 1 after
    any failure of a rank. It prints all failures, and the earliest one last.
    """
    found = _FAILURE.findall("\n".join(words)) if status == 1 else []
    return Failure(*map(int, found[-1])) if found else None


def _master_port(options: Mapping[str, str]) -> int | None:
    if "standalone" in options or options.get("rdzv-backend", "static") != "static":
        return 0
    port = options.get("rdzv-endpoint", "").rpartition(":")[2] or options.get("master-port", "")
    return int(port) if port.isdigit() else None


def _options(command: Sequence[str]) -> dict[str, str]:
    """Return the values of all --options in the command, by name.

    If a name occurs twice, the first value counts, because the script's own options follow torchrun's.
    """
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            found.setdefault(name[2:].replace("_", "-"), value if has_value else following)
    return found


# Agents prefer these variables to RANK and WORLD_SIZE, so values inherited from another group must be cleared.
_RANK_COUNTS = {"LIGHTHOUSE_GROUP_RANK": "", "LIGHTHOUSE_GROUP_WORLD_SIZE": ""}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The command that a supervisor runs, and the settings that determine the environment of its ranks."""

    command: tuple[str, ...]  # command of each rank
    layout: Layout
    host: int  # number of this host in the group
    replica_id: str
    job: str
    run: str
    incarnation: str  # prefix of the ranks' incarnations, by which the lighthouse identifies their supervisor
    lighthouse: str  # address of the lighthouse
    manager: str  # address of the group's manager
    master: tuple[str, int]  # host and port
    max_restarts: int
    slot_offset: int = 0
    slots: int = 1  # number of slots in the whole run
    # The next three are for ranks that use Wrapper.
    active: int | None = None
    min_active: int = 1
    stride: int = DEFAULT_STRIDE
    store_port: int | None = None  # on the master host; None if no supervisor runs a store
    keeps_place: bool = False  # the ranks inherit RANK, WORLD_SIZE etc. from the supervisor's environment
    torchrun: Torchrun | None = None  # set if the command is torchrun, which then runs once per host
    trace_dir: str | None = None
    # Environment variables with the paths of the PEM files of the user's own PKI, for the ranks.
    tls_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    # Secrets with which the ranks authenticate to the lighthouse and to the manager. Empty if there is none.
    run_secret: str = field(default="", repr=False)
    manager_secret: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Name of this supervisor in the run."""
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
        """Return the number of the process that runs a rank: the rank or, with torchrun, the rank's host.

        With torchrun, the number is 0 if the world size is unknown.
        """
        if self.torchrun is None:
            return rank
        return rank * self.layout.hosts // self.torchrun.world_size if self.torchrun.world_size else 0

    def label(self, rank: int) -> str:
        """Return the prefix for each line of the rank's output."""
        return f"{self.replica_id}/{rank}"

    def log_name(self, rank: int, attempt: int) -> str:
        folder = urllib.parse.quote(self.replica_id, safe="@+=")
        folder = folder.replace(".", "%2E") if set(folder) == {"."} else folder  # `..` is outside the log folder
        return f"{folder}/attempt_{attempt}/rank_{rank}.log"

    def environment(self, rank: int, attempt: int, incarnation: str) -> dict[str, str]:
        """Return the environment variables of a rank's process, or of torchrun, which sets its ranks' variables.

        `attempt` is the number of this start, counted from 0. `incarnation` identifies the start at the lighthouse.
        """
        ours = self._common(attempt) | self._run(incarnation)
        if self.torchrun is not None:
            return ours | self._torchrun()
        if self.keeps_place:  # the rank keeps its own RANK, but for its Agent it is a whole replica group
            place = self._master() | {"LIGHTHOUSE_GROUP_RANK": "0", "LIGHTHOUSE_GROUP_WORLD_SIZE": "1"}
        else:
            place = self._rank(rank, attempt)
        return ours | place | {"LIGHTHOUSE_SLOT": str(self.slot_of(rank))}

    def _common(self, attempt: int) -> dict[str, str]:
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

    def _torchrun(self) -> dict[str, str]:
        """Return the environment variables for torchrun.

        Each rank derives its slot from LIGHTHOUSE_SLOT_OFFSET. PET_ variables are defaults of torchrun's options. They
        are set only if the store's port is derived from the master port. Otherwise, torchrun may choose the master
        port, so that several torchrun processes can run on one host.
        """
        master = {f"PET_{name}": value for name, value in self._master().items()}
        is_known = self.store_port == self.master[1] + STORE_PORT_OFFSET
        return {"LIGHTHOUSE_SLOT_OFFSET": str(self.slot_offset)} | _RANK_COUNTS | (master if is_known else {})

    def _rank(self, rank: int, attempt: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a rank."""
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
