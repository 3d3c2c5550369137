"""The settings of `lighthouse-manager serve`."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from lighthouse_protocol.identity import Address, check_name, parse_address
from lighthouse_protocol.limits import DEFAULT_JOB, LIGHTHOUSE_PORT, MANAGER_PORT, MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import setting
from lighthouse_runtime.client.channel import target
from lighthouse_runtime.net.bind import check_bind, split_bind
from lighthouse_runtime.net.own_address import advertised_host
from lighthouse_runtime.process.logs import FORMATS, LEVELS

ENV_PREFIX = "LIGHTHOUSE_MANAGER"

_PATH = click.Path(dir_okay=False, path_type=Path)
_SIZE = click.IntRange(1, MAX_GROUP_WORLD_SIZE)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Raises ValueError, naming the option, for a value that cannot be used."""

    lighthouse: str = setting(
        dataclasses.MISSING,
        "Address of the lighthouse; http://host:port works too.",
        env=("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"),
        metavar="HOST:PORT",
    )
    replica_id: str = setting(
        dataclasses.MISSING,
        "Name of this replica group, the same after every restart.",
        env=("REPLICA_GROUP_ID",),
        metavar="ID",
    )
    group_world_size: int = setting(1, "Ranks in the group.", kind=_SIZE, env=("WORLD_SIZE",))
    bind: str = setting(f"[::]:{MANAGER_PORT}", "Where gRPC listens; port 0: any free port.", metavar="HOST:PORT")
    store: str = setting(
        "auto", "The group's TCPStore; auto: host one in a child process (needs torch).", metavar="HOST:PORT|auto"
    )
    store_python: str = setting(
        sys.executable, "The Python interpreter that hosts the store; it must have torch.", metavar="PATH"
    )
    advertise: str | None = setting(
        None,
        "This host's address as its peers reach it. Default: that of --bind or, if that is all addresses, the one that "
        "routes to the lighthouse.",
        metavar="HOST",
    )
    http: str | None = setting(
        None, "Where /metrics, /livez, /readyz and /status are served. Default: nowhere.", metavar="HOST:PORT"
    )
    job: str = setting(
        DEFAULT_JOB, "The job of this group, if several jobs share a lighthouse.", env=("LIGHTHOUSE_JOB",)
    )
    rank_timeout_s: float | None = setting(
        None,
        "Time without a request after which a rank that keeps no watch open (torchft's, a script's) counts as lost. "
        "Default: never.",
        kind=Duration(),
    )
    stall_timeout_s: float = setting(
        FLOOR_S,
        "How long a rank may work without progress before the log names it; 5 times its longest healthy time, if that "
        "is longer.",
        kind=Duration(),
    )
    control_token_file: Path | None = setting(
        None, "Callers on other hosts that present this file's token may kill the group.", kind=_PATH
    )
    allow_remote_control: bool = setting(False, "Let anyone who reaches the port kill the group.")
    drain_timeout_s: float = setting(
        30.0, "How long ranks may take to finish their step after SIGTERM or a drain.", kind=Duration()
    )
    shutdown_timeout_s: float = setting(2.0, "How long open calls may take to end after SIGTERM.", kind=Duration())
    log_level: str = setting("info", "The least severe level to log.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "The format of the log.", kind=click.Choice(FORMATS))

    def __post_init__(self) -> None:
        check_bind(self.bind, "--bind")
        if self.http is not None:
            check_bind(self.http, "--http")
        try:
            target(self.lighthouse, "--lighthouse", LIGHTHOUSE_PORT)
            check_name(self.replica_id, "--replica-id")
            check_name(self.job, "--job")
            if self.store != "auto":
                target(self.store, "--store")
                _check_reachable(parse_address(self.store, "--store"), "--store")
            if self.advertise is not None:
                check_host(self.advertise, "--advertise")
        except InvalidRequest as e:
            raise ValueError(str(e)) from None

    def advertised_host(self) -> str:
        """By which peers reach this manager and its store. Raises InvalidRequest, naming the option."""
        return advertised_host(self.lighthouse, self.advertise, split_bind(self.bind, "--bind")[0])


def check_host(host: str, option: str) -> None:
    """Raises InvalidRequest for what is no host that the peers can reach."""
    address = parse_address(host, option)
    _check_reachable(address, option)
    if address.port is not None:
        raise InvalidRequest(f"{host} has a port; give the host alone", field=option)


def _check_reachable(address: Address, option: str) -> None:
    if address.is_unspecified:
        raise InvalidRequest(f"{address} is nobody's address; give one that the peers can reach", field=option)
