"""The settings of `lighthouse-manager run`, beside those of `serve`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lighthouse_protocol.identity import check_name
from lighthouse_protocol.limits import DEFAULT_RUN, MANAGER_PORT, MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import setting
from lighthouse_runtime.client.channel import target
from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.restart_policy import GROUP_SCOPE, RANK_SCOPE, RestartPolicy

STORE_PORT_OFFSET = 2

_COUNT = click.IntRange(1, MAX_GROUP_WORLD_SIZE)
_COUNT_OR_NONE = click.IntRange(0, MAX_GROUP_WORLD_SIZE)
_PORT = click.IntRange(1, 65535)


class _Modules(click.ParamType):
    """Names of modules, with commas between them."""

    name = "modules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(name.strip() for name in str(value).split(","))
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                self.fail(f"{name!r} is no name of a module", param, ctx)
        return names


_FOLDER = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Raises ValueError, naming the option, for values that do not fit together."""

    nproc: int = setting(1, "How many ranks this host starts.", kind=_COUNT)
    nnodes: int = setting(1, "How many hosts the replica group has.", kind=_COUNT)
    node_rank: int = setting(0, "Which of them this one is; host 0 serves the manager.", kind=_COUNT_OR_NONE)
    manager: str | None = setting(
        None, "On the other hosts: the manager that host 0 serves.", env=("MANAGER_ADDRESS",), metavar="HOST:PORT"
    )
    run_id: str = setting(
        DEFAULT_RUN, "The run: a stop holds for all of its groups.", env=("LIGHTHOUSE_RUN_ID", "TORCHELASTIC_RUN_ID")
    )
    max_restarts: int = setting(3, "So many restarts within --restart-window; 0: none.", kind=_COUNT_OR_NONE)
    restart_window_s: float = setting(3600.0, "A restart that is longer ago counts no more.", kind=Duration())
    restart_delay_s: float = setting(
        0.5, "Before the first restart; each one after it in the window waits twice as long.", kind=Duration()
    )
    max_restart_delay_s: float = setting(30.0, "No restart waits longer.", kind=Duration())
    startup_failures: int = setting(
        3, "So many deaths in a row, each within --startup-time of its start, are not mended by a restart; 0: off.",
        kind=_COUNT_OR_NONE,
    )  # fmt: skip
    startup_time_s: float = setting(
        10.0, "How long after its start a death counts as one at the start.", kind=Duration()
    )
    restart_scope: str | None = setting(
        None,
        "What starts again when a rank dies: the whole replica group, or that rank. Default: rank with --active.",
        kind=click.Choice((GROUP_SCOPE, RANK_SCOPE)),
    )
    restart_after_kill: str = setting(
        "yes", "Whether the ranks of a replica group that is killed by request start again.",
        kind=click.Choice(("yes", "no")),
    )  # fmt: skip
    abort_code: int = setting(
        130, "A rank that ends by it stops the run for all; 0: none does.", kind=click.IntRange(0, 255)
    )
    exclude_after: int = setting(
        0, "This host is excluded when so many losses in a row began on it; 0: never.", kind=_COUNT_OR_NONE
    )
    health_check: str | None = setting(
        None, "A command that must end with 0 before each start; a host where it does not is excluded.", metavar="CMD"
    )
    health_check_timeout_s: float = setting(60.0, "How long it may take.", kind=Duration())
    node_timeout_s: float = setting(600.0, "How long the replica group waits for a missing host.", kind=Duration())
    grace_s: float = setting(
        10.0, "How long ranks have from SIGTERM to SIGKILL; 1 s at most when the run is stopped.", kind=Duration()
    )
    log_dir: Path | None = setting(
        None, "Write the ranks' output there: a file for each rank and attempt.", kind=_FOLDER, metavar="FOLDER"
    )
    log_collectives: Path | None = setting(
        None, "Agents write there when they enter and leave each phase and collective: a file for each process.",
        kind=_FOLDER, env=("LIGHTHOUSE_LOG_COLLECTIVES",), metavar="FOLDER",
    )  # fmt: skip
    tee: bool = setting(False, "With --log-dir: show the output as well.")
    master_port: int = setting(
        29500, "MASTER_PORT of the ranks, for what they open among themselves.", kind=_PORT, env=("MASTER_PORT",)
    )
    store_port: int | None = setting(
        None, "Where the replica group's TCPStore listens. Default: the master port + 2.", kind=_PORT
    )
    preload: tuple[str, ...] = setting(
        (), "Import these once, and fork each rank of a Python command from there; may be given several times.",
        kind=_Modules(), is_list=True, metavar="MODULE,...",
    )  # fmt: skip
    active: int | None = setting(
        None, "So many ranks train, and the others are spares (for agent_client.restart). Default: all.", kind=_COUNT
    )
    min_active: int = setting(1, "With fewer the run is stopped.", kind=_COUNT)
    generation_stride: int = setting(100, "A restarted process begins at the next multiple of it.", kind=_COUNT)
    first_slot: int = setting(
        0, "The slot of this replica group's first rank, where wrapped ranks of several share a run.",
        kind=_COUNT_OR_NONE,
    )  # fmt: skip
    run_slots: int | None = setting(None, "How many slots the whole run has. Default: this group's.", kind=_COUNT)

    def __post_init__(self) -> None:
        try:
            check_name(self.run_id, "--run-id")
            if self.manager is not None:
                target(self.manager, "--manager", MANAGER_PORT)
        except InvalidRequest as e:
            raise ValueError(str(e)) from None
        self._check_fit()

    def _check_fit(self) -> None:
        if self.health_check is not None and not _words(self.health_check):
            raise ValueError(f"--health-check {self.health_check!r} is no command")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} is none of --nnodes {self.nnodes}; the first is 0")
        if self.node_rank > 0 and self.manager is None:
            raise ValueError("--manager is missing: a host but the first needs the address that the first one serves")
        if self.active is not None and self.active > self.slots:
            raise ValueError(f"--active {self.active} are more than the {self.slots} ranks that there are")
        if self.min_active > (self.active or self.slots):
            raise ValueError(f"--min-active {self.min_active} are more than the {self.active or self.slots} that train")
        if self.tee and self.log_dir is None:
            raise ValueError("--tee needs --log-dir; without it the output is shown anyway")
        if self.first_slot + self.layout.world_size > self.slots:
            raise ValueError(f"--run-slots {self.slots} are too few for slots from --first-slot {self.first_slot} on")
        if self.chosen_store_port > 65535:
            raise ValueError(f"--master-port {self.master_port} + {STORE_PORT_OFFSET} is no port; give --store-port")

    @property
    def layout(self) -> Layout:
        return Layout(self.nnodes, self.nproc)

    @property
    def slots(self) -> int:
        return self.run_slots if self.run_slots is not None else self.first_slot + self.layout.world_size

    @property
    def chosen_store_port(self) -> int:
        return self.store_port if self.store_port is not None else self.master_port + STORE_PORT_OFFSET

    @property
    def policy(self) -> RestartPolicy:
        default_scope = GROUP_SCOPE if self.active is None else RANK_SCOPE
        return RestartPolicy(
            max_restarts=self.max_restarts,
            window_s=self.restart_window_s,
            delay_s=self.restart_delay_s,
            max_delay_s=self.max_restart_delay_s,
            startup_failures=self.startup_failures,
            startup_s=self.startup_time_s,
            exclude_after=self.exclude_after,
            abort_code=self.abort_code,
            scope=self.restart_scope or default_scope,
            restart_after_kill=self.restart_after_kill == "yes",
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []
