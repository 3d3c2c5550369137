"""The settings of `lighthouse serve`."""

from dataclasses import dataclass
from pathlib import Path

import click

from lighthouse.etcd.address import EtcdAddress, parse_etcd_address
from lighthouse.etcd.credentials import StoreCredentials
from lighthouse.incidents.rules.policy import OnStall
from lighthouse.journal.journal import Journal, default_path
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.store import NoJobStore
from lighthouse_protocol.limits import JOIN_TIMEOUT_S, KEEPALIVE_S, LIGHTHOUSE_HTTP_PORT, LIGHTHOUSE_PORT
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.rules.peer_limits import PeerLimits
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import setting
from lighthouse_runtime.net.bind import check_bind, check_host, split_bind
from lighthouse_runtime.process.logs import FORMATS, LEVELS
from lighthouse_runtime.process.state_folder import state_folder

ENV_PREFIX = "LIGHTHOUSE"
KEEPALIVE_SHARE = 0.4  # of the heartbeat timeout: beside it there is room for two usual heartbeats, or one of a crowd
MIN_STORE_TTL_S = 2


class Sizes(click.ParamType):
    """`2,4,8`: numbers of replica groups."""

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
    """Raises ValueError, naming the options, for settings that contradict each other."""

    bind: str = setting(f"[::]:{LIGHTHOUSE_PORT}", "Where gRPC listens.", metavar="HOST:PORT")
    http: str = setting(
        f"[::]:{LIGHTHOUSE_HTTP_PORT}", "Where /metrics, /status and the page are served.", metavar="HOST:PORT"
    )
    min_replicas: int = setting(1, "Minimum replica groups in a quorum.", kind=_COUNT)
    join_timeout_s: float = setting(
        JOIN_TIMEOUT_S,
        "How long a quorum waits for a live group that has not joined.",
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
        "How long a manager may grant steps without an answer from the lighthouse; default: the heartbeat timeout.",
        kind=Duration(),
    )
    standing_quorum: str = setting(
        "on",
        "on: managers grant steps under a lease; off: every step asks the lighthouse, as with torchft.",
        kind=click.Choice(["on", "off"]),
    )
    journal: str | None = setting(
        None,
        "The file that keeps quorums over a restart; default: one for this port in the user's state directory; "
        "none: keep nothing, and a restart during training is not safe.",
        metavar="PATH|none",
    )
    store: str | None = setting(
        None,
        "The etcd that several lighthouses share, of which one leads; default: the journal's file.",
        metavar="etcd://HOST:PORT,...[/PREFIX]",
    )
    store_ttl_s: float = setting(
        3.0,
        "With --store: how long the leader's key outlives a leader that is gone; in whole seconds.",
        kind=Duration(),
    )
    store_ca: Path | None = setting(
        None, "With --store: the CA of etcd's certificates; etcd is reached by TLS then.", kind=_PATH
    )
    store_cert: Path | None = setting(None, "With --store-ca: this lighthouse's certificate for etcd.", kind=_PATH)
    store_key: Path | None = setting(None, "With --store-cert: its key.", kind=_PATH)
    store_user_file: Path | None = setting(
        None, "With --store: a file with one line, NAME:PASSWORD, for an etcd that asks for it.", kind=_PATH
    )
    advertise: str | None = setting(
        None,
        "With --store: the host by which others reach this lighthouse; default: that of --bind, or this host's name.",
        metavar="HOST",
    )
    allowed_replicas: tuple[int, ...] = setting(
        (), "The only sizes of a quorum, for example 2,4,8.", kind=Sizes(), metavar="SIZES"
    )
    active_replicas: int | None = setting(None, "Maximum groups that train; the others wait as spares.", kind=_COUNT)
    spare_promotion_delay_s: float = setting(
        1.0,
        "With --active-replicas: how long a lost group may take to come back before a spare takes its place.",
        kind=Duration(),
    )
    allow_heterogeneous: bool = setting(False, "Admit groups with different numbers of ranks to one quorum.")
    max_members: int = setting(10_000, "Maximum replica groups known per job.", kind=_COUNT)
    max_open_per_peer: int = setting(
        PeerLimits().open,
        "Maximum calls and streams that one host may have open; more where more managers than that share an address, "
        "and what a host may send grows with it.",
        kind=_COUNT,
    )
    stall_timeout_s: float = setting(
        FLOOR_S,
        "How long ranks may wait for each other before the log names those that are behind. How long a rank may work "
        "without progress is its manager's setting; for ranks of runs without managers it is this one, too.",
        kind=Duration(),
    )
    on_stall: str = setting(
        OnStall.NOTIFY.value,
        "What to do about a stall once its evidence is collected: report it, restart the groups of the ranks behind, "
        "or stop the run.",
        kind=click.Choice([policy.value for policy in OnStall]),
    )
    incident_dir: Path | None = setting(
        None,
        "The folder for incidents; default: one beside the journal, if there is a journal.",
        kind=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
    )
    credentials: Path | None = setting(
        None,
        "The folder of certificates and tokens, which the first start makes; default: one for this port in the user's "
        "state directory. A lighthouse on a loopback has none.",
        kind=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
    )
    tls_cert: Path | None = setting(
        None,
        "This lighthouse's certificate, and those between it and its CA, where they are of your own PKI; read again "
        "when the file changes. Default: one by a CA that the first start makes.",
        kind=_FILE,
    )
    tls_key: Path | None = setting(None, "With --tls-cert: its key.", kind=_FILE)
    tls_client_ca: Path | None = setting(
        None,
        "The CAs whose certificates callers must show over gRPC, and may show over HTTP; read again when the file "
        "changes.",
        kind=_FILE,
    )
    tls_identities: Path | None = setting(
        None,
        "With --tls-client-ca: a TOML file that gives certificates a role, by their SPIFFE ids and DNS names. Without "
        "a role a caller needs a token, too.",
        kind=_FILE,
    )
    insecure: bool = setting(
        False,
        "Serve other hosts without TLS: anyone who reaches the port may join and read models. To kill, drain and stop "
        "still takes the operate token.",
    )
    torchft_listen: str | None = setting(
        None,
        "A second port, without TLS, for torchft's clients alone: anyone who reaches it may join. Default: none.",
        metavar="HOST:PORT",
    )
    shutdown_timeout_s: float = setting(2.0, "How long open calls may take to end after SIGTERM.", kind=Duration())
    log_level: str = setting("info", "The least severe level to log.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "The format of the log.", kind=click.Choice(FORMATS))

    def __post_init__(self) -> None:
        for option, where in (("--bind", self.bind), ("--http", self.http)):
            check_bind(where, option)
        if self.torchft_listen is not None:
            check_bind(self.torchft_listen, "--torchft-listen")
        self._check_store()
        self._check_tls()
        if self.active_replicas is not None and self.active_replicas < self.min_replicas:
            raise ValueError(
                f"--active-replicas {self.active_replicas} is below --min-replicas {self.min_replicas}: "
                "no quorum could form"
            )
        if self.allowed_replicas and max(self.allowed_replicas) < self.min_replicas:
            raise ValueError(
                f"--allowed-replicas has no size of at least --min-replicas {self.min_replicas}: no quorum could form"
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
                raise ValueError(f"{option} needs {needed}, too")
        if self.insecure and self.asks_for_tls:
            raise ValueError("--insecure and --tls-cert or --tls-client-ca contradict each other; leave one out")

    @property
    def asks_for_tls(self) -> bool:
        """Also on a loopback."""
        return self.tls_cert is not None or self.tls_client_ca is not None

    def quorum_config(self, first_quorum_id: int) -> QuorumConfig:
        return QuorumConfig(
            min_replicas=self.min_replicas,
            join_timeout_s=self.join_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            allowed_sizes=frozenset(self.allowed_replicas),
            active=self.active_replicas,
            allow_heterogeneous=self.allow_heterogeneous,
            max_replicas=self.max_members,
            first_quorum_id=first_quorum_id,
            lease_s=self.lease_s or self.heartbeat_timeout_s,
            stands=self.standing_quorum == "on",
            last_call_s=self.spare_promotion_delay_s,
        )

    @property
    def keepalive_s(self) -> float:
        """Who raises the heartbeat timeout allows longer pauses: a connection must not end for them before."""
        return max(KEEPALIVE_S, KEEPALIVE_SHARE * self.heartbeat_timeout_s)

    def etcd(self) -> EtcdAddress | None:
        """None: the records are in the journal."""
        return None if self.store is None else parse_etcd_address(self.store)

    def store_credentials(self) -> StoreCredentials:
        return StoreCredentials(self.store_ca, self.store_cert, self.store_key, self.store_user_file)

    def memory(self) -> Journal | NoJobStore:
        """Not claimed yet. A lighthouse on any free port has no next life that could find its journal."""
        _, port = split_bind(self.bind, "--bind")
        if self.store is not None or self.journal == "none" or (self.journal is None and not port):
            return NoJobStore()
        path = Path(self.journal) if self.journal else default_path().with_name(f"journal-{port}.sqlite")
        return Journal(path, self.bind)

    def credentials_folder(self) -> Path:
        """Beside the journal. Raises InvalidRequest, naming --credentials."""
        if self.credentials is not None:
            return self.credentials
        _, port = split_bind(self.bind, "--bind")
        has_journal = self.journal is not None and self.journal != "none"
        folder = Path(self.journal).parent if self.journal and has_journal else state_folder("--credentials")
        return folder / f"credentials-{port}"

    def incident_folder(self, memory: Journal | NoJobStore) -> Path | None:
        """None: they are kept for as long as the lighthouse lives."""
        if self.incident_dir is not None:
            return self.incident_dir
        _, port = split_bind(self.bind, "--bind")
        if self.store is not None and port:
            return default_path().with_name(f"journal-{port}.incidents")
        return memory.path.with_suffix(".incidents") if isinstance(memory, Journal) else None
