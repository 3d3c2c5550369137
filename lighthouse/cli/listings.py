"""Verbs that list things: `members`, `ranks`, `runs`, `keys` and `stacks`.

Each prints a table for people or a JSON document for programs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.text import Text

from lighthouse.cli.layout import Column, table
from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options, run_options
from lighthouse.cli.tables import (
    SUPERVISOR_COLUMNS,
    counted,
    gathered_lines,
    member_lines,
    member_rows,
    natural_key,
    stall,
    supervised,
    wrapped,
)
from lighthouse.job.records import key_text
from lighthouse_protocol.limits import DEFAULT_JOB
from lighthouse_protocol.messages.incident import gathered_document
from lighthouse_protocol.messages.progress import STEP, RankPlace, RankState
from lighthouse_protocol.messages.run import RunStatus
from lighthouse_protocol.messages.status import JobStatus, LighthouseStatus
from lighthouse_runtime.cli import format_duration, printable


@click.command()
@client_options(job_help=EVERY_JOB)
def members(given: ClientOptions) -> None:
    """List the replica groups."""
    answer = given.status()
    rows = member_rows(answer)
    given.show(answer, lambda width: member_lines(rows, width) if rows else [Text("no members")])


Row = tuple[str, RankPlace]

SILENT_S = 3.0
_ORDER = list(RankState)
_STYLES = {RankState.BEHIND: "red", RankState.LOST: "red", RankState.WAITING: "cyan", RankState.RUNNING: "green"}


@click.command()
@client_options(job_help=EVERY_JOB)
def ranks(given: ClientOptions) -> None:
    """List what every rank is doing, ranks that are behind first.

    During a stall, the first line names the ranks that are behind.

    RANK: replica group and rank, or run and slot. GEN: the last generation in which a rank of a run was active.
    COMPUTE: compute time of a microbatch over the median of its peers, in the last minute and the last 10 minutes.
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
    is_compared = any(rank.compute_ratio_1m is not None for _, rank in rows)
    hidden = [column for column, is_shown in ((_GENERATION, is_of_run), (_COMPUTE, is_compared)) if not is_shown]
    return [*lines, *table([column for column in _COLUMNS if column not in hidden], rows, width)]


def _verdict(job: JobStatus, has_many_jobs: bool, width: int) -> Sequence[Text]:
    line = Text.assemble(f"{job.job}: ", stall(job)) if has_many_jobs else stall(job)
    return wrapped(line, width)


def _order(rank: RankPlace) -> Any:
    """Return the sort key of a rank: most urgent state first, then longest without progress, then by name."""
    return _ORDER.index(rank.state), -round(rank.progress_age_s), natural_key(rank.replica_id), rank.group_rank


def _where(rank: RankPlace) -> str:
    """Describe where a rank is: in a collective, a declared wait or a phase, or at a line of the script."""
    if rank.is_inside:
        return rank.collective
    if rank.waits_for:
        return f"waits for {rank.waits_for}"
    return (rank.at or "-") if rank.phase == STEP else rank.phase


def _ticks(rank: RankPlace) -> str:
    if rank.total is None:
        return str(rank.done) if rank.done else "-"
    return f"{rank.done}/{rank.total}"


def _ratios(rank: RankPlace) -> str:
    ratios = [ratio for ratio in (rank.compute_ratio_1m, rank.compute_ratio_10m) if ratio is not None]
    return " ".join(f"{ratio:.1f}x" for ratio in ratios) or "-"


_GENERATION: Column[Row] = Column(
    "GEN", lambda row: "-" if row[1].generation is None else str(row[1].generation), is_number=True
)
_COMPUTE: Column[Row] = Column(
    "COMPUTE", lambda row: _ratios(row[1]), lambda row: "red" if row[1].is_slow else "", is_number=True, keep=4
)
_COLUMNS: Sequence[Column[Row]] = (
    Column("JOB", lambda row: row[0], keep=5, tells_apart=True),
    Column("RANK", lambda row: f"{row[1].replica_id}/{row[1].group_rank}", comfort=12),
    Column("STATE", lambda row: row[1].state.value, lambda row: _STYLES.get(row[1].state, "")),
    _GENERATION,
    Column("STEP", lambda row: str(row[1].step), is_number=True),
    Column("WHERE", lambda row: _where(row[1]), comfort=12),
    _COMPUTE,
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


@click.command()
@run_options(default=None)
def runs(given: ClientOptions) -> None:
    """List the runs, their supervised groups and restarts.

    A waiting run shows what it is waiting for; a stopped run shows who stopped it. LEFT is the number of restarts that
    a supervisor's budget still allows. `lighthouse incidents` lists why generations and processes ended.
    """
    with given.connect() as client:
        found = client.runs(given.run, timeout_s=given.timeout)
    given.show(found, lambda width: [line for run in found for line in run_lines(run, width)] or [Text("no runs")])


def run_lines(run: RunStatus, width: int) -> Iterator[Text]:
    yield _line(run)
    if supervisors := sorted(run.supervisors, key=lambda supervisor: natural_key(supervisor.name)):
        yield from (Text.assemble("  ", row) for row in table(SUPERVISOR_COLUMNS, supervisors, width - 2))


def _line(run: RunStatus) -> Text:
    number, counters = run.counters.number, run.counters
    at = f"generation {number}, {counted(len(run.slots), 'rank')}" if number >= 0 else "no generation yet"
    said = f"  {at}, {counted(counters.job_restarts, 'restart')}, {run.verdict}"
    if number < 0 and run.supervisors and run.stop is None:
        said = f"  {supervised(run)}"
    stop = run.stop
    by = "" if stop is None else f": {stop.text}"
    return Text.assemble((printable(f"{run.job}/{run.run}"), "bold"), printable(said), (printable(by), "red"))


@click.command()
@run_options()
@click.option("--generation", "of", type=click.IntRange(0), help="Generation to show.  [default: the current one]")
def keys(given: ClientOptions, of: int | None) -> None:
    """List the keys that the ranks of a run have set."""
    with given.connect() as client:
        generation, found = client.get_keys(of=of, timeout_s=given.timeout)
    generation = generation if of is None else of
    rows = {key_text(generation, kind, name): value.decode(errors="replace") for (kind, name), value in found.items()}
    lines = [Text(printable(f"{name} = {value}")) for name, value in sorted(rows.items())]
    given.show({"run": given.run, "generation": generation, "keys": rows}, lambda _: lines or [Text("no keys")])


@click.command()
@click.option(
    "--rank",
    "ranks",
    metavar="RANK",
    multiple=True,
    help="b/1, or b for all its ranks. May be repeated.  [default: all]",
)
@client_options(job_help=f"Job of the ranks.  [default: {DEFAULT_JOB}]", timeout="15s")
def stacks(given: ClientOptions, ranks: tuple[str, ...]) -> None:
    """Show the current Python stacks of all ranks.

    The output includes each rank's most recent collectives, process and last output, and lists what could not be
    collected. Ranks are not interrupted. This also works for a rank that holds the interpreter lock.
    """
    with given.connect() as client:
        gathered = client.stacks(ranks, timeout_s=given.timeout)
    lines = list(gathered_lines(gathered)) or [Text("no rank is in a quorum; `lighthouse status` shows why")]
    given.show(gathered_document(gathered), lambda _: lines)
