"""The settings of `lighthouse serve`."""

from dataclasses import dataclass
from pathlib import Path

import click

from lighthouse.incidents.rules.policy import OnStall
from lighthouse.journal.journal import Journal, default_path
from lighthouse.quorum.rules.config import QuorumConfig
from lighthouse.quorum.store import NoJobStore
from lighthouse_protocol.limits import JOIN_TIMEOUT_S, LIGHTHOUSE_HTTP_PORT, LIGHTHOUSE_PORT
from lighthouse_protocol.rules.stall import FLOOR_S
from lighthouse_runtime.cli.durations import Duration
from lighthouse_runtime.cli.settings import setting
from lighthouse_runtime.net.bind import check_bind, split_bind
from lighthouse_runtime.process.logs import FORMATS, LEVELS

ENV_PREFIX = "LIGHTHOUSE"


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
    control_token_file: Path | None = setting(
        None, "Callers on other hosts that present this file's token may kill groups and read evidence.", kind=_PATH
    )
    allow_remote_control: bool = setting(False, "Let anyone who reaches the port kill groups and read evidence.")
    shutdown_timeout_s: float = setting(2.0, "How long open calls may take to end after SIGTERM.", kind=Duration())
    log_level: str = setting("info", "The least severe level to log.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "The format of the log.", kind=click.Choice(FORMATS))

    def __post_init__(self) -> None:
        for option, where in (("--bind", self.bind), ("--http", self.http)):
            check_bind(where, option)
        if self.active_replicas is not None and self.active_replicas < self.min_replicas:
            raise ValueError(
                f"--active-replicas {self.active_replicas} is below --min-replicas {self.min_replicas}: "
                "no quorum could form"
            )
        if self.allowed_replicas and max(self.allowed_replicas) < self.min_replicas:
            raise ValueError(
                f"--allowed-replicas has no size of at least --min-replicas {self.min_replicas}: no quorum could form"
            )

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

    def memory(self) -> Journal | NoJobStore:
        """Not claimed yet. A lighthouse on any free port has no next life that could find its journal."""
        _, port = split_bind(self.bind, "--bind")
        if self.journal == "none" or (self.journal is None and not port):
            return NoJobStore()
        path = Path(self.journal) if self.journal else default_path().with_name(f"journal-{port}.sqlite")
        return Journal(path, self.bind)

    def incident_folder(self, memory: Journal | NoJobStore) -> Path | None:
        """None: they are kept for as long as the lighthouse lives."""
        if self.incident_dir is not None:
            return self.incident_dir
        return memory.path.with_suffix(".incidents") if isinstance(memory, Journal) else None
