"""Settings for `lighthouse serve`.

`LighthouseConfig` declares every option once, with its default and its help text; the command line, the environment
variables and the reference documentation are generated from it. It rejects options that contradict each other, and
derives what the daemon needs: the settings of the quorum rules, the journal, and the folders of credentials and
incidents.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import click

from lighthouse.job.incidents import OnStall
from lighthouse.job.records import QuorumConfig
from lighthouse.job.slow_ranks import SLOW_AFTER_S
from lighthouse.job.store import MemoryStore
from lighthouse.store.etcd_client import EtcdClient, StoreCredentials, parse_etcd_address
from lighthouse.store.sqlite import Journal, default_path
from lighthouse_protocol.limits import JOIN_TIMEOUT_S, KEEPALIVE_S, LIGHTHOUSE_HTTP_PORT, LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.rate_limits import PeerLimits
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli import Duration, setting
from lighthouse_runtime.net.address import check_bind, check_host, is_http_url, split_bind
from lighthouse_runtime.process.files import state_folder
from lighthouse_runtime.process.logs import FORMATS, LEVELS

ENV_PREFIX = "LIGHTHOUSE"
# Fraction of the heartbeat timeout: leaves room for two heartbeats, or for one late heartbeat of a busy host.
KEEPALIVE_SHARE = 0.4
MIN_STORE_TTL_S = 2


class Sizes(click.ParamType):
    """Click type for a list of quorum sizes, such as `2,4,8`. The value is a sorted tuple of ints."""

    name = "sizes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value  # type: ignore[return-value]
        try:
            sizes = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; write for example 2,4,8", param, ctx)
        if sizes[0] < 1:
            self.fail(f"{value!r}: a quorum has at least 1 replica group", param, ctx)
        return sizes


_COUNT = click.IntRange(min=1)
_PATH = click.Path(dir_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class LighthouseConfig:
    """Options for `lighthouse serve`.

    Raises:
        ValueError: If options contradict each other.
    """

    bind: str = setting(f"[::]:{LIGHTHOUSE_PORT}", "gRPC listen address.", metavar="HOST:PORT")
    http: str = setting(
        f"[::]:{LIGHTHOUSE_HTTP_PORT}", "Listen address of /metrics, /status and the dashboard.", metavar="HOST:PORT"
    )
    min_replicas: int = setting(1, "Minimum replica groups in a quorum.", kind=_COUNT)
    join_timeout_s: float = setting(
        JOIN_TIMEOUT_S,
        "Maximum time that a quorum waits for a live group that has not joined.",
        kind=Duration(),
        has_ms_alias=True,
    )
    heartbeat_timeout_s: float = setting(
        5.0, "Time without a heartbeat after which a group counts as lost.", kind=Duration(), has_ms_alias=True
    )
    rank_timeout_s: float = setting(
        30.0, "Time without a connection after which a rank of a run counts as lost.", kind=Duration()
    )
    lease_s: float | None = setting(
        None,
        "Time that a manager may grant steps without an answer from the lighthouse. Default: the heartbeat timeout.",
        kind=Duration(),
    )
    standing_quorum: str = setting(
        "on",
        "on: managers grant steps under a lease; off: every step asks the lighthouse, as with torchft.",
        kind=click.Choice(["on", "off"]),
    )
    journal: str | None = setting(
        None,
        "File that keeps quorums across restarts. Default: one for this port in the user's state directory. "
        "none: keep nothing; a restart during training is then unsafe.",
        metavar="PATH|none",
    )
    store: str | None = setting(
        None,
        "etcd cluster that several lighthouses share; one of them leads. Default: none, the journal is used.",
        metavar="etcd://HOST:PORT,...[/PREFIX]",
    )
    store_ttl_s: float = setting(
        3.0,
        "With --store: time until another lighthouse may replace a lost leader, in whole seconds.",
        kind=Duration(),
    )
    store_ca: Path | None = setting(
        None, "With --store: CA of etcd's certificates; enables TLS; reloaded when the file changes.", kind=_PATH
    )
    store_cert: Path | None = setting(
        None, "With --store-ca: client certificate for etcd; reloaded when the file changes.", kind=_PATH
    )
    store_key: Path | None = setting(None, "Private key of --store-cert.", kind=_PATH)
    store_user_file: Path | None = setting(
        None, "With --store: file with one line, NAME:PASSWORD, if etcd requires authentication.", kind=_PATH
    )
    advertise: str | None = setting(
        None,
        "With --store: host at which others reach this lighthouse. Default: that of --bind, or this host's name.",
        metavar="HOST",
    )
    allowed_replicas: tuple[int, ...] = setting(
        (), "Allowed sizes of a quorum, for example 2,4,8. Default: any.", kind=Sizes(), metavar="SIZES"
    )
    active_replicas: int | None = setting(
        None, "Maximum number of groups that train; the others wait as spares. Default: all.", kind=_COUNT
    )
    spare_promotion_delay_s: float = setting(
        1.0,
        "With --active-replicas: time that a lost group has to return before a spare replaces it.",
        kind=Duration(),
    )
    allow_heterogeneous: bool = setting(False, "Admit groups with different numbers of ranks to one quorum.")
    max_members: int = setting(10_000, "Maximum replica groups known per job.", kind=_COUNT)
    max_open_per_peer: int = setting(
        PeerLimits().open,
        "Maximum open calls and streams per client address; raise it if more managers share one address. It also "
        "scales how much an address may send.",
        kind=_COUNT,
    )
    stall_timeout_s: float = setting(
        FLOOR_S,
        "Time that ranks may wait for each other before the log names those that are behind. For runs without "
        "managers, it also limits how long a rank may work without progress; otherwise the manager's --stall-timeout "
        "does.",
        kind=Duration(),
    )
    slow_after_s: float = setting(
        SLOW_AFTER_S,
        "Time for which a rank must compute 1.5 times as long as its peers before it is reported as slow.",
        kind=Duration(),
    )
    on_stall: str = setting(
        OnStall.NOTIFY.value,
        "Action on a stall after its evidence is collected: report it, restart the groups of the ranks behind, or stop "
        "the run.",
        kind=click.Choice([policy.value for policy in OnStall]),
    )
    incident_dir: Path | None = setting(
        None,
        "Folder for incidents. Default: one next to the journal, if there is a journal.",
        kind=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
    )
    credentials: Path | None = setting(
        None,
        "Folder of certificates and tokens, which the first start creates; not used on a loopback address. "
        "Default: one for this port in the user's state directory.",
        kind=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
    )
    tls_cert: Path | None = setting(
        None,
        "TLS certificate chain, if you use your own PKI; reloaded when the file changes. Default: a certificate from a "
        "CA that the first start creates.",
        kind=_FILE,
    )
    tls_key: Path | None = setting(None, "Private key of --tls-cert.", kind=_FILE)
    tls_client_ca: Path | None = setting(
        None,
        "CAs of client certificates, which gRPC then requires and HTTP accepts; reloaded when the file changes.",
        kind=_FILE,
    )
    tls_identities: Path | None = setting(
        None,
        "With --tls-client-ca: TOML file that maps SPIFFE IDs and DNS names to roles. A caller without a role also "
        "needs a token.",
        kind=_FILE,
    )
    insecure: bool = setting(
        False,
        "Disable TLS. Anyone who can reach the port can then join and read model weights; kill, drain and stop still "
        "need the operate token.",
    )
    torchft_listen: str | None = setting(
        None,
        "Second listen address without TLS, for torchft clients only: anyone who can reach it can join. Default: none.",
        metavar="HOST:PORT",
    )
    allow_chaos: bool = setting(
        False,
        "Let `lighthouse chaos` inject faults into jobs. A group takes part only if it also has --allow-chaos.",
    )
    on_preemption: str | None = setting(
        None,
        "URL to which each preemption notice of a replica group is posted as JSON, to request a replacement. "
        "Default: none.",
        metavar="URL",
    )
    shutdown_timeout_s: float = setting(2.0, "Time that open calls have to end after SIGTERM.", kind=Duration())
    log_level: str = setting("info", "Minimum log level.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "Log format.", kind=click.Choice(FORMATS))

    def __post_init__(self) -> None:
        for option, where in (("--bind", self.bind), ("--http", self.http)):
            check_bind(where, option)
        if self.torchft_listen is not None:
            check_bind(self.torchft_listen, "--torchft-listen")
        if self.on_preemption is not None and not is_http_url(self.on_preemption):
            raise ValueError(f"--on-preemption {self.on_preemption} is not an http or https URL")
        self._check_store()
        self._check_tls()
        if self.active_replicas is not None and self.active_replicas < self.min_replicas:
            raise ValueError(
                f"--active-replicas {self.active_replicas} is below --min-replicas {self.min_replicas}: "
                "no quorum could form"
            )
        most = math.inf if self.active_replicas is None else self.active_replicas
        if self.allowed_replicas and not any(self.min_replicas <= size <= most for size in self.allowed_replicas):
            and_most = "" if self.active_replicas is None else f" and at most --active-replicas {self.active_replicas}"
            raise ValueError(
                f"--allowed-replicas has no size of at least --min-replicas {self.min_replicas}{and_most}: no quorum "
                "could form"
            )

    def _check_store(self) -> None:
        if self.store is None:
            credentials = {
                "--store-ca": self.store_ca,
                "--store-cert": self.store_cert,
                "--store-key": self.store_key,
                "--advertise": self.advertise,
                "--store-user-file": self.store_user_file,
            }
            for option, given in credentials.items():
                if given is not None:
                    raise ValueError(f"{option} is for --store, which is not given")
            return
        if self.journal not in (None, "none"):
            raise ValueError("--journal and --store are two places for the same records; give one of them")
        if self.store_ttl_s < MIN_STORE_TTL_S or self.store_ttl_s != int(self.store_ttl_s):
            raise ValueError(f"--store-ttl {self.store_ttl_s:g}s: give whole seconds, at least {MIN_STORE_TTL_S}")
        try:
            if self.advertise is not None:
                check_host(self.advertise, "--advertise")
            parse_etcd_address(self.store)
        except InvalidRequest as e:
            raise ValueError(str(e)) from None

    def _check_tls(self) -> None:
        for option, given, needed, other in (
            ("--tls-cert", self.tls_cert, "--tls-key", self.tls_key),
            ("--tls-key", self.tls_key, "--tls-cert", self.tls_cert),
            ("--tls-identities", self.tls_identities, "--tls-client-ca", self.tls_client_ca),
        ):
            if given is not None and other is None:
                raise ValueError(f"{option} also needs {needed}")
        if self.insecure and self.is_tls_required:
            raise ValueError("--insecure and --tls-cert or --tls-client-ca contradict each other; leave one out")

    @property
    def is_tls_required(self) -> bool:
        """True if an option requires TLS even on a loopback address."""
        return self.tls_cert is not None or self.tls_client_ca is not None

    def quorum_config(self) -> QuorumConfig:
        return QuorumConfig(
            min_replicas=self.min_replicas,
            join_timeout_s=self.join_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            allowed_sizes=frozenset(self.allowed_replicas),
            active=self.active_replicas,
            allow_heterogeneous=self.allow_heterogeneous,
            max_replicas=self.max_members,
            lease_s=self.lease_s or self.heartbeat_timeout_s,
            stands=self.standing_quorum == "on",
            last_call_s=self.spare_promotion_delay_s,
        )

    @property
    def keepalive_s(self) -> float:
        """Keepalive time of gRPC connections in seconds.

        It grows with the heartbeat timeout, so that a connection survives any pause that the timeout tolerates.
        """
        return max(KEEPALIVE_S, KEEPALIVE_SHARE * self.heartbeat_timeout_s)

    def etcd_client(self) -> EtcdClient | None:
        """Return a client for the shared store, not yet open, or None without --store."""
        if self.store is None:
            return None
        credentials = StoreCredentials(self.store_ca, self.store_cert, self.store_key, self.store_user_file)
        return EtcdClient(parse_etcd_address(self.store), credentials.tls(), credentials.user())

    def memory(self) -> Journal | MemoryStore:
        """Return the journal, which the caller must still claim, or a store in memory if there is no journal.

        A lighthouse on port 0 has no journal by default. Its port changes at each restart, and with it the name of the
        default file.
        """
        _, port = split_bind(self.bind, "--bind")
        if self.store is not None or self.journal == "none" or (self.journal is None and not port):
            return MemoryStore()
        path = Path(self.journal) if self.journal else default_path().with_name(f"journal-{port}.sqlite")
        return Journal(path, self.bind)

    def credentials_folder(self) -> Path:
        """Return the folder of certificates and tokens, by default next to the journal.

        Raises:
            InvalidRequest: If the default is needed, but the user has no home directory.
        """
        if self.credentials is not None:
            return self.credentials
        _, port = split_bind(self.bind, "--bind")
        has_journal = self.journal is not None and self.journal != "none"
        folder = Path(self.journal).parent if self.journal and has_journal else state_folder("--credentials")
        return folder / f"credentials-{port}"

    def incident_folder(self, memory: Journal | MemoryStore) -> Path | None:
        """Return the folder for incidents, or None if they stay in memory only. `memory` is the result of memory()."""
        if self.incident_dir is not None:
            return self.incident_dir
        _, port = split_bind(self.bind, "--bind")
        if self.store is not None and port:
            return default_path().with_name(f"journal-{port}.incidents")
        return memory.path.with_suffix(".incidents") if isinstance(memory, Journal) else None
