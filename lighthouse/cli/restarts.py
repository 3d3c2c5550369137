"""`lighthouse restarts`: why a run's generations ended, and how long it took to go on."""

from collections.abc import Sequence

import click
from rich.text import Text

from lighthouse.cli.incidents import clock
from lighthouse.cli.options import ClientOptions, run_options
from lighthouse.cli.view.layout import Column, table
from lighthouse_protocol.messages.run_status import RestartStatus, RunStatus
from lighthouse_runtime.cli.terminal import printable


@click.command()
@click.option("--evidence", is_flag=True, help="Show the last lines of each dead process below its incident.")
@run_options(default=None)
def restarts(given: ClientOptions, evidence: bool) -> None:
    """List the incidents of a run: the generation that ended, why, which ranks were lost, and when it went on."""
    with given.connect() as client:
        runs = client.runs(given.run, timeout_s=given.timeout)
    given.show(runs, lambda width: _lines(runs, width, evidence) or [Text("no runs")])


def _lines(runs: Sequence[RunStatus], width: int, has_evidence: bool) -> list[Text]:
    return [line for run in runs for line in run_lines(run, width, has_evidence=has_evidence)]


def run_lines(run: RunStatus, width: int, *, has_evidence: bool) -> list[Text]:
    titles, *rows = table(_COLUMNS, run.incidents, width)
    lines = [summary(run), *([titles] if rows else [])]
    for incident, row in zip(run.incidents, rows, strict=True):
        lines += [row, *(_evidence(incident) if has_evidence else [])]
    return lines


def summary(run: RunStatus) -> Text:
    """One line: what it is at, and whether it is over."""
    number, counters = run.counters.number, run.counters
    at = f"generation {number}, {len(run.slots)} ranks" if number >= 0 else "no generation yet"
    said = f"  {at}, {counters.job_restarts} restarts, {run.verdict}"
    stop = run.stop
    by = "" if stop is None else f": {stop.reason} (by {stop.who or 'the lighthouse'})"
    return Text.assemble((printable(f"{run.job}/{run.run}"), "bold"), printable(said), (printable(by), "red"))


def _evidence(incident: RestartStatus) -> Sequence[Text]:
    return [Text(printable(f"    | {line}"), style="dim") for line in incident.evidence]


def _after(incident: RestartStatus, at: float | None) -> str:
    return "-" if at is None else f"+{at - incident.noticed_at:.3f}s"


_COLUMNS: Sequence[Column[RestartStatus]] = (
    Column("GENERATION", lambda i: str(i.generation) if i.generation >= 0 else "-", is_number=True),
    Column("NOTICED", lambda i: clock(i.noticed_at), keep=2),
    Column("FORMED", lambda i: _after(i, i.formed_at), is_number=True),
    Column("FIRST STEP", lambda i: _after(i, i.stepped_at), is_number=True),
    Column("NEXT", lambda i: "-" if i.formed is None else str(i.formed), is_number=True, keep=3),
    Column("LOST", lambda i: ", ".join(i.lost) or "-", keep=1, comfort=16),
    Column("CAUSE", lambda i: i.cause, lambda i: "red" if i.is_fault else "", comfort=24),
)
