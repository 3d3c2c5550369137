"""`lighthouse incidents`: what stood still, was lost or restarted, and when training went on."""

from collections.abc import Sequence
from datetime import datetime

import click
from rich.text import Text

from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.view.layout import Column, table
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_runtime.cli.durations import format_duration


@click.command()
@click.option("--kind", type=click.Choice([kind.value for kind in IncidentKind]), help="Show only this kind.")
@client_options(job_help=EVERY_JOB)
def incidents(given: ClientOptions, kind: str | None) -> None:
    """List incidents, newest first.

    Times count from the fault: NOTICED, until the lighthouse detected it; RECOVERED, until the other groups committed
    their next step; BACK, until the lost groups were in the quorum again.
    """
    with given.connect() as client:
        found = [each for each in client.incidents(given.job, timeout_s=given.timeout) if kind in (None, each.kind)]
    given.show(found, lambda width: incident_lines(found, width))


def incident_lines(summaries: Sequence[IncidentSummary], width: int) -> list[Text]:
    return table(_COLUMNS, summaries, width) if summaries else [Text("no incidents")]


def clock(at_unix_s: float) -> str:
    return datetime.fromtimestamp(at_unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _after(seconds: float | None) -> str:
    """A loss is a matter of milliseconds."""
    if seconds is None:
        return "-"
    return f"{1000 * max(0.0, seconds):.0f}ms" if seconds < 0.9995 else format_duration(seconds)


def _style(summary: IncidentSummary) -> str:
    return "red" if summary.step_s is None else ""


_COLUMNS: Sequence[Column[IncidentSummary]] = (
    Column("ID", lambda i: i.id),
    Column("JOB", lambda i: i.job, keep=4, comfort=12, tells_apart=True),
    Column("NOTICED AT", lambda i: clock(i.opened_unix_s), keep=0),
    Column("KIND", lambda i: i.kind.value, lambda i: "yellow" if i.kind is IncidentKind.STALL else "red", keep=1),
    Column("NOTICED", lambda i: _after(i.noticed_s), is_number=True, keep=0),
    Column("RECOVERED", lambda i: _after(i.step_s), _style, is_number=True, keep=3),
    Column("BACK", lambda i: _after(i.back_s), is_number=True, keep=2),
    Column("WHAT", lambda i: i.text, comfort=36, is_prose=True),
)
