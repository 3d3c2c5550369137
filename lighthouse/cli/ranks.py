"""`lighthouse ranks`: where every rank is, and which are behind."""

from collections.abc import Sequence
from typing import Any

import click
from rich.text import Text

from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.view.layout import Column, table
from lighthouse.cli.view.tables import natural_key, stall, wrapped
from lighthouse_protocol.messages.progress import STEP
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus, RankPlace, RankState
from lighthouse_runtime.cli.durations import format_duration

Row = tuple[str, RankPlace]

SILENT_S = 3.0
_ORDER = list(RankState)
_STYLES = {RankState.BEHIND: "red", RankState.LOST: "red", RankState.WAITING: "cyan", RankState.RUNNING: "green"}


@click.command()
@client_options(job_help=EVERY_JOB)
def ranks(given: ClientOptions) -> None:
    """List where every rank is, ranks that are behind first.

    During a stall, the first line names the ranks that are behind.

    RANK: replica group and rank, or run and slot. GEN: the last generation in which a rank of a run was active.
    BEAT: time since the last heartbeat of its process. STILL: time since its last progress.
    """
    answer = given.status(ranks=True)
    given.show(answer, lambda width: rank_lines(answer, width))


def rank_lines(status: LighthouseStatus, width: int) -> list[Text]:
    rows = [(job.job, rank) for job in status.jobs for rank in sorted(job.ranks, key=_order)]
    lines = [line for job in status.jobs if job.stall for line in _verdict(job, len(status.jobs) > 1, width)]
    if not rows:
        return [*lines, Text("no ranks have reported")]
    is_of_run = any(rank.generation is not None or rank.state is RankState.SPARE for _, rank in rows)
    return [*lines, *table([column for column in _COLUMNS if is_of_run or column is not _GENERATION], rows, width)]


def _verdict(job: JobStatus, has_many_jobs: bool, width: int) -> Sequence[Text]:
    line = Text.assemble(f"{job.job}: ", stall(job)) if has_many_jobs else stall(job)
    return wrapped(line, width)


def _order(rank: RankPlace) -> Any:
    """The worst first, then those that stand still longest, then by name."""
    return _ORDER.index(rank.state), -round(rank.progress_age_s), natural_key(rank.replica_id), rank.group_rank


def _where(rank: RankPlace) -> str:
    """In a collective, in a declared wait, in a phase, or at a line of the script."""
    if rank.is_inside:
        return rank.collective
    if rank.waits_for:
        return f"waits for {rank.waits_for}"
    return (rank.at or "-") if rank.phase == STEP else rank.phase


def _ticks(rank: RankPlace) -> str:
    if rank.total is None:
        return str(rank.done) if rank.done else "-"
    return f"{rank.done}/{rank.total}"


_GENERATION: Column[Row] = Column(
    "GEN", lambda row: "-" if row[1].generation is None else str(row[1].generation), is_number=True
)
_COLUMNS: Sequence[Column[Row]] = (
    Column("JOB", lambda row: row[0], keep=5, tells_apart=True),
    Column("RANK", lambda row: f"{row[1].replica_id}/{row[1].group_rank}", comfort=12),
    Column("STATE", lambda row: row[1].state.value, lambda row: _STYLES.get(row[1].state, "")),
    _GENERATION,
    Column("STEP", lambda row: str(row[1].step), is_number=True),
    Column("WHERE", lambda row: _where(row[1]), comfort=12),
    Column("DONE", lambda row: _ticks(row[1]), is_number=True, keep=4),
    Column("STILL", lambda row: format_duration(row[1].progress_age_s), is_number=True),
    Column(
        "BEAT",
        lambda row: format_duration(row[1].beat_age_s),
        lambda row: "red" if row[1].beat_age_s > SILENT_S else "",
        is_number=True,
        keep=3,
    ),
    Column("HOST", lambda row: row[1].host or "-", keep=2, comfort=12),
    Column("PID", lambda row: str(row[1].pid or "-"), is_number=True, keep=1),
)
