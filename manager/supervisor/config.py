"""Settings for `lighthouse-manager run`, in addition to those of `serve`.

`SupervisorConfig` declares every option once, with its default and its help text, and validates the options together.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from lighthouse_protocol.identity import check_name, parse_target
from lighthouse_protocol.limits import (
    DEFAULT_RUN,
    DEFAULT_STRIDE,
    MANAGER_PORT,
    MASTER_PORT,
    MAX_GROUP_WORLD_SIZE,
    MAX_KEEP_EVERY,
    STORE_PORT_OFFSET,
)
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.cli import Duration, setting
from lighthouse_runtime.net.address import check_host, is_http_url
from manager.preemption.sources import METADATA_ENDPOINT, parse_sources
from manager.supervisor.rules.machine import Layout
from manager.supervisor.rules.restart_policy import GROUP_SCOPE, RANK_SCOPE, RestartPolicy

_COUNT = click.IntRange(1, MAX_GROUP_WORLD_SIZE)
_COUNT_OR_NONE = click.IntRange(0, MAX_GROUP_WORLD_SIZE)
_PORT = click.IntRange(1, 65535)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Options for `lighthouse-manager run`.

    Raises:
        ValueError: If a value is invalid or contradicts another one. The message names the option.
    """

    nproc_per_node: int = setting(1, "Ranks to start on this host.", kind=_COUNT)
    nnodes: int = setting(1, "Hosts of the replica group.", kind=_COUNT)
    node_rank: int = setting(0, "Index of this host; host 0, the head, serves the manager.", kind=_COUNT_OR_NONE)
    head: str | None = setting(
        None,
        "Address of the manager on host 0; required on every other host.",
        env=("LIGHTHOUSE_MANAGER_ADDRESS",),
        metavar="HOST:PORT",
    )
    run_id: str = setting(
        DEFAULT_RUN,
        "ID of the run. Groups that share it are stopped together.",
        env=("LIGHTHOUSE_RUN_ID", "TORCHELASTIC_RUN_ID"),
    )
    max_restarts: int = setting(3, "Maximum restarts within --restart-window; 0: none.", kind=_COUNT_OR_NONE)
    restart_window_s: float = setting(3600.0, "Period over which restarts are counted.", kind=Duration())
    restart_delay_s: float = setting(
        0.5, "Delay before the first restart; doubles with each restart in the window.", kind=Duration()
    )
    max_restart_delay_s: float = setting(30.0, "Longest delay before a restart.", kind=Duration())
    max_startup_failures: int = setting(
        3,
        "Consecutive deaths, each within --startup-time of the start, after which the group ends; 0: no limit.",
        kind=_COUNT_OR_NONE,
    )
    startup_time_s: float = setting(
        10.0, "Time after a rank's start during which its death counts as a start-up failure.", kind=Duration()
    )
    restart_scope: str | None = setting(
        None,
        "What restarts when a rank dies: the whole replica group, or only that rank. Default: rank with "
        "--active-ranks, else group.",
        kind=click.Choice((GROUP_SCOPE, RANK_SCOPE)),
    )
    restart_after_kill: str = setting(
        "yes", "Whether the ranks restart after `lighthouse kill` of their group.", kind=click.Choice(("yes", "no"))
    )
    stop_exit_code: int = setting(
        130, "Exit code of a rank that stops the run for all groups; 0 disables this.", kind=click.IntRange(0, 255)
    )
    exclude_host_after: int = setting(
        0, "Exclude a host after this many consecutive losses that began on it; 0: never.", kind=_COUNT_OR_NONE
    )
    health_check: str | None = setting(
        None, "Command to run before each start; if it fails, the host is excluded. Default: none.", metavar="CMD"
    )
    health_check_timeout_s: float = setting(60.0, "Timeout of --health-check.", kind=Duration())
    node_timeout_s: float = setting(600.0, "Maximum time to wait for a missing host of the group.", kind=Duration())
    termination_grace_s: float = setting(
        10.0,
        "Time from SIGTERM to SIGKILL of ranks; at most 1 s when the run is stopped, longer after a preemption notice.",
        kind=Duration(),
    )
    log_dir: Path | None = setting(
        None, "Folder for output, one file per rank and attempt. Default: none.", kind=_FOLDER, metavar="FOLDER"
    )
    trace_dir: Path | None = setting(
        None,
        "Folder for traces of each phase and collective, one file per process. Default: none.",
        kind=_FOLDER,
        env=("LIGHTHOUSE_TRACE_DIR",),
        metavar="FOLDER",
    )
    observe: str = setting(
        "on",
        "Whether `lighthouse ranks` shows a script without an Agent: its collectives and its current line.",
        kind=click.Choice(("on", "off")),
    )
    tee: bool = setting(False, "With --log-dir: print the output as well.")
    keep_every: int = setting(
        0,
        "Interval in steps at which each rank keeps a copy of its state in the supervisor's memory, so that it "
        "continues from that copy if all groups die; 0: never. Each rank needs memory for two copies.",
        kind=click.IntRange(0, MAX_KEEP_EVERY),
    )
    preemption: str = setting(
        "auto",
        "Sources of preemption notices: off, or a list of auto, aws, gcp, azure, slurm, kubernetes and file=PATH. "
        "auto: the cloud of this host, and kubernetes in a pod.",
        metavar="auto|off|SOURCES",
    )
    preemption_grace_s: float = setting(
        30.0,
        "Time from SIGTERM to the end of a pod (terminationGracePeriodSeconds), or of a preempted Slurm job.",
        kind=Duration(),
    )
    metadata_endpoint: str = setting(METADATA_ENDPOINT, "Metadata service of the cloud.", metavar="URL")
    master_addr: str | None = setting(
        None,
        "Host of the store that slot 0 serves, for ranks that another launcher starts (fork_and_monitor); they keep "
        "their RANK and WORLD_SIZE. Default: none.",
        metavar="HOST",
    )
    master_port: int = setting(MASTER_PORT, "MASTER_PORT of the ranks.", kind=_PORT, env=("MASTER_PORT",))
    store_port: int | None = setting(
        None, "Port of the replica group's TCPStore. Default: the master port + 2.", kind=_PORT
    )
    active_ranks: int | None = setting(
        None, "Ranks that train; the others are spares (for scripts with Wrapper). Default: all.", kind=_COUNT
    )
    min_active_ranks: int = setting(1, "Stop the run when fewer ranks than this can train.", kind=_COUNT)
    generation_stride: int = setting(
        DEFAULT_STRIDE, "A restarted process starts its generation numbers at the next multiple of this.", kind=_COUNT
    )
    slot_offset: int = setting(
        0,
        "Slot of this group's first rank, if wrapped ranks of several groups share a run.",
        kind=_COUNT_OR_NONE,
    )
    run_world_size: int | None = setting(
        None, "Number of slots in the whole run. Default: the ranks of this group.", kind=_COUNT
    )

    def __post_init__(self) -> None:
        try:
            check_name(self.run_id, "--run-id")
            if self.head is not None:
                parse_target(self.head, "--head", MANAGER_PORT)
            if self.master_addr is not None:
                check_host(self.master_addr, "--master-addr")
        except InvalidRequest as e:
            raise ValueError(str(e)) from None
        parse_sources(self.preemption)
        if not is_http_url(self.metadata_endpoint):
            raise ValueError(f"--metadata-endpoint {self.metadata_endpoint}: give an http:// or https:// URL")
        self._check_fit()

    def _check_fit(self) -> None:
        if self.health_check is not None and not _words(self.health_check):
            raise ValueError(f"--health-check {self.health_check!r} is not a command")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}; the first is 0")
        if self.node_rank > 0 and self.head is None:
            raise ValueError("--head is missing: every host but host 0 needs the address of host 0's manager")
        if self.active_ranks is not None and self.active_ranks > self.slot_count:
            raise ValueError(f"--active-ranks {self.active_ranks} is more than the {self.slot_count} ranks of the run")
        if self.min_active_ranks > (self.active_ranks or self.slot_count):
            most = self.active_ranks or self.slot_count
            raise ValueError(f"--min-active-ranks {self.min_active_ranks} is more than the {most} ranks that train")
        if self.tee and self.log_dir is None:
            raise ValueError("--tee needs --log-dir; without it the output is shown anyway")
        if self.slot_offset + self.layout.world_size > self.slot_count:
            last = self.slot_offset + self.layout.world_size
            raise ValueError(
                f"--run-world-size {self.slot_count} is too small: with --slot-offset {self.slot_offset} this replica "
                f"group has slots below {last}"
            )
        if self.master_addr is not None and self.layout.world_size > 1:
            raise ValueError("--master-addr is only for a supervisor of one rank that another launcher started")
        if self.chosen_store_port > 65535:
            raise ValueError(f"--master-port {self.master_port} + {STORE_PORT_OFFSET} is not a port; give --store-port")

    @property
    def layout(self) -> Layout:
        return Layout(self.nnodes, self.nproc_per_node)

    @property
    def slot_count(self) -> int:
        return self.run_world_size if self.run_world_size is not None else self.slot_offset + self.layout.world_size

    @property
    def chosen_store_port(self) -> int:
        return self.store_port if self.store_port is not None else self.master_port + STORE_PORT_OFFSET

    @property
    def policy(self) -> RestartPolicy:
        default_scope = GROUP_SCOPE if self.active_ranks is None else RANK_SCOPE
        return RestartPolicy(
            max_restarts=self.max_restarts,
            window_s=self.restart_window_s,
            delay_s=self.restart_delay_s,
            max_delay_s=self.max_restart_delay_s,
            max_startup_failures=self.max_startup_failures,
            startup_s=self.startup_time_s,
            exclude_host_after=self.exclude_host_after,
            stop_exit_code=self.stop_exit_code,
            scope=self.restart_scope or default_scope,
            restart_after_kill=self.restart_after_kill == "yes",
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []
