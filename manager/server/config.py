"""The settings of `lighthouse-manager serve`."""

import dataclasses
import sys
from dataclasses import dataclass

import click

from lighthouse_protocol.coordinator import Coordinator, TlsFiles, parse_coordinator
from lighthouse_protocol.identity import check_name, parse_target
from lighthouse_protocol.limits import DEFAULT_JOB, MANAGER_PORT, MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import setting
from lighthouse_runtime.net.bind import check_bind, check_host, check_reachable, split_bind
from lighthouse_runtime.net.own_address import advertised_host
from lighthouse_runtime.process.logs import FORMATS, LEVELS
from lighthouse_runtime.security.client_tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE

ENV_PREFIX = "LIGHTHOUSE_MANAGER"

_SIZE = click.IntRange(1, MAX_GROUP_WORLD_SIZE)
_FILE = click.Path(exists=True, dir_okay=False)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Raises ValueError, naming the option, for a value that cannot be used."""

    lighthouse: str = setting(
        dataclasses.MISSING,
        "Address of the lighthouse, or its join string; http://host:port works too.",
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
    continue_: bool = setting(
        False, "Train on although the job has ended without this group; else the group then ends with 0."
    )
    tls_ca: str | None = setting(
        None,
        "The CA of the lighthouse's certificate, where that is of your own PKI and no join string pins it.",
        kind=_FILE,
        env=(CA_VARIABLE,),
        metavar="FILE",
    )
    client_cert: str | None = setting(
        None,
        "The certificate to show to a lighthouse with --tls-client-ca; read again for each connection.",
        kind=_FILE,
        env=(CERT_VARIABLE,),
        metavar="FILE",
    )
    client_key: str | None = setting(
        None, "With --client-cert: its key.", kind=_FILE, env=(KEY_VARIABLE,), metavar="FILE"
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
            _ = self.coordinator
            check_name(self.replica_id, "--replica-id")
            check_name(self.job, "--job")
            if self.store != "auto":
                check_reachable(parse_target(self.store, "--store"), "--store")
            if self.advertise is not None:
                check_host(self.advertise, "--advertise")
        except InvalidRequest as e:
            raise ValueError(str(e)) from None

    @property
    def coordinator(self) -> Coordinator:
        return parse_coordinator(self.lighthouse, "--lighthouse").with_files(self.tls_files)

    @property
    def tls_files(self) -> TlsFiles:
        return TlsFiles(self.tls_ca or "", self.client_cert or "", self.client_key or "")

    def advertised_host(self) -> str:
        """By which peers reach this manager and its store. Raises InvalidRequest, naming the option."""
        return advertised_host(str(self.coordinator.addresses[0]), self.advertise, split_bind(self.bind, "--bind")[0])
