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
    min_replicas: int = setting(1, "No quorum of fewer replica groups.", kind=_COUNT)
    join_timeout_s: float = setting(
        JOIN_TIMEOUT_S, "How long a live group that has not joined is waited for.", kind=Duration(), has_ms_alias=True
    )
    heartbeat_timeout_s: float = setting(
        5.0, "After so long without a sign of life a group counts as dead.", kind=Duration(), has_ms_alias=True
    )
    rank_timeout_s: float = setting(
        30.0, "A rank of a run whose connection is not open counts as lost after so long.", kind=Duration()
    )
    lease_s: float | None = setting(
        None,
        "How long a group may go on with a standing quorum without an echo; default: the heartbeat timeout.",
        kind=Duration(),
    )
    standing_quorum: str = setting(
        "on", "Off: every step asks the lighthouse, as with torchft; for comparison.", kind=click.Choice(["on", "off"])
    )
    journal: str | None = setting(
        None,
        "Where the quorum is kept for a restart; default: a file for this port under the user's state directory; "
        "none: nothing is kept, and a restart under training is not safe.",
        metavar="PATH|none",
    )
    allowed_replicas: tuple[int, ...] = setting(
        (), "Form quorums of these sizes only, for example 2,4,8.", kind=Sizes(), metavar="SIZES"
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
        "Ranks that wait for each other may do so for so long before the log says who is behind; how long one may work "
        "without a move is its manager's setting.",
        kind=Duration(),
    )
    on_stall: str = setting(
        OnStall.NOTIFY.value,
        "What is done when nothing moves, once the evidence is taken: it is made known, the groups of the ranks behind "
        "are killed, or the run is stopped.",
        kind=click.Choice([policy.value for policy in OnStall]),
    )
    incident_dir: Path | None = setting(
        None,
        "Where incidents are filed; default: a folder beside the journal, if there is one.",
        kind=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
    )
    control_token_file: Path | None = setting(
        None, "Who has this file's token may kill, and see what ranks do, from another host.", kind=_PATH
    )
    allow_remote_control: bool = setting(False, "Anyone who reaches the port may kill, and see what ranks do.")
    shutdown_timeout_s: float = setting(2.0, "How long calls under way may take to end after SIGTERM.", kind=Duration())
    log_level: str = setting("info", "What is logged.", kind=click.Choice(LEVELS))
    log_format: str = setting("text", "How it is logged.", kind=click.Choice(FORMATS))

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
