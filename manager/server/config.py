"""Settings for `lighthouse-manager serve`, which `run` shares.

`ManagerConfig` declares every option once, with its default and its help text. It validates the options together and
derives the addresses that the manager advertises.
"""

import dataclasses
import sys
from dataclasses import dataclass

import click

from lighthouse_protocol.coordinator import Coordinator, TlsFiles, parse_coordinator
from lighthouse_protocol.identity import check_name, parse_target
from lighthouse_protocol.limits import DEFAULT_JOB, MANAGER_PORT, MAX_GROUP_WORLD_SIZE
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli import Duration, setting
from lighthouse_runtime.net.address import advertised_host, check_bind, check_host, check_reachable, split_bind
from lighthouse_runtime.process.logs import FORMATS, LEVELS
from lighthouse_runtime.security.client_tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE

ENV_PREFIX = "LIGHTHOUSE_MANAGER"

_SIZE = click.IntRange(1, MAX_GROUP_WORLD_SIZE)
_FILE = click.Path(exists=True, dir_okay=False)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Options for `lighthouse-manager serve`.

    Raises:
        ValueError: If a value cannot be used. The message names the option.
    """

    lighthouse: str = setting(
        dataclasses.MISSING,
        "Address or join string of the lighthouse; http://host:port also works.",
        env=("LIGHTHOUSE_ADDRESS", "TORCHFT_LIGHTHOUSE"),
        metavar="HOST:PORT",
    )
    replica_id: str = setting(
        dataclasses.MISSING,
        "Name of this replica group; keep it across restarts.",
        env=("REPLICA_GROUP_ID",),
        metavar="ID",
    )
    group_world_size: int = setting(1, "Ranks in the group.", kind=_SIZE, env=("WORLD_SIZE",))
    bind: str = setting(f"[::]:{MANAGER_PORT}", "gRPC listen address; port 0: any free port.", metavar="HOST:PORT")
    store: str = setting(
        "auto", "TCPStore of the group; auto: host one in a child process (needs torch).", metavar="HOST:PORT|auto"
    )
    store_python: str = setting(
        sys.executable, "Python interpreter that hosts the store; it needs torch.", metavar="PATH"
    )
    advertise: str | None = setting(
        None,
        "Address at which peers reach this host; if --bind is a wildcard, the address that routes to the lighthouse. "
        "Default: the host of --bind.",
        metavar="HOST",
    )
    http: str | None = setting(
        None, "Listen address of /metrics, /livez, /readyz and /status. Default: none.", metavar="HOST:PORT"
    )
    job: str = setting(DEFAULT_JOB, "Job of this group, if several jobs share a lighthouse.", env=("LIGHTHOUSE_JOB",))
    continue_: bool = setting(
        False, "Continue training although the job has ended without this group. Default: the group ends with status 0."
    )
    tls_ca: str | None = setting(
        None,
        "CA of the lighthouse's certificate, if you use your own PKI and no join string pins it.",
        kind=_FILE,
        env=(CA_VARIABLE,),
        metavar="FILE",
    )
    client_cert: str | None = setting(
        None,
        "Client certificate for a lighthouse with --tls-client-ca; reloaded for each connection.",
        kind=_FILE,
        env=(CERT_VARIABLE,),
        metavar="FILE",
    )
    client_key: str | None = setting(
        None, "Private key of --client-cert.", kind=_FILE, env=(KEY_VARIABLE,), metavar="FILE"
    )
    rank_timeout_s: float | None = setting(
        None,
        "Time without a request after which a rank without a watch stream (a torchft rank or a plain script) counts as "
        "lost. Default: never.",
        kind=Duration(),
    )
    stall_timeout_s: float = setting(
        FLOOR_S,
        "Time that a rank may work without progress before the log names it; 5 times its longest healthy time, if that "
        "is longer.",
        kind=Duration(),
    )
    drain_timeout_s: float = setting(
        30.0, "Time that ranks have to finish their step after SIGTERM or a drain.", kind=Duration()
    )
    shutdown_timeout_s: float = setting(2.0, "Time that open calls have to end after SIGTERM.", kind=Duration())
    allow_chaos: bool = setting(
        False,
        "Let `lighthouse chaos` inject faults into this group. The lighthouse needs --allow-chaos, too.",
    )
    log_level: str = setting("info", "Minimum log level.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "Log format.", kind=click.Choice(FORMATS))

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
        """Return the host at which peers reach this manager. Raise InvalidRequest if --bind excludes --advertise."""
        return advertised_host(str(self.coordinator.addresses[0]), self.advertise, split_bind(self.bind, "--bind")[0])
