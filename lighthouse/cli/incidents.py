"""Verbs `incidents`, which lists incidents, and `incident`, which shows one with its timeline and evidence."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import click
from rich.text import Text

from lighthouse.cli.layout import Column, table
from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options
from lighthouse.cli.tables import gathered_lines, wrapped
from lighthouse_protocol.messages.incident import Gathered, Incident, IncidentKind, IncidentSummary, to_document
from lighthouse_runtime.cli import format_duration, printable


@click.command()
@click.option("--kind", type=click.Choice([kind.value for kind in IncidentKind]), help="Show only this kind.")
@client_options(job_help=EVERY_JOB)
def incidents(given: ClientOptions, kind: str | None) -> None:
    """List incidents, newest first.

    Times count from the fault. NOTICED: until the lighthouse detected it. RECOVERED: until other groups committed their
    next step, or a slow rank was no longer slow. BACK: until the lost groups were in the quorum again.
    """
    with given.connect() as client:
        found = [each for each in client.incidents(given.job, timeout_s=given.timeout) if kind in (None, each.kind)]
    given.show(found, lambda width: incident_lines(found, width))


def incident_lines(summaries: Sequence[IncidentSummary], width: int) -> list[Text]:
    return table(_COLUMNS, summaries, width) if summaries else [Text("no incidents")]


def clock(at_unix_s: float) -> str:
    return datetime.fromtimestamp(at_unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _recovered_s(summary: IncidentSummary) -> float | None:
    return summary.over_s if summary.kind is IncidentKind.SLOW else summary.step_s


def _short_duration(seconds: float | None) -> str:
    """Format a duration, in milliseconds if it is below a second. None becomes "-"."""
    if seconds is None:
        return "-"
    return f"{1000 * max(0.0, seconds):.0f}ms" if seconds < 0.9995 else format_duration(seconds)


_COLUMNS: Sequence[Column[IncidentSummary]] = (
    Column("ID", lambda i: i.id),
    Column("JOB", lambda i: i.job, keep=4, comfort=12, tells_apart=True),
    Column("NOTICED AT", lambda i: clock(i.opened_unix_s), keep=0),
    Column("KIND", lambda i: i.kind.value, lambda i: "yellow" if i.kind is IncidentKind.STALL else "red", keep=1),
    Column("NOTICED", lambda i: _short_duration(i.noticed_s), is_number=True, keep=0),
    Column(
        "RECOVERED",
        lambda i: _short_duration(_recovered_s(i)),
        lambda i: "red" if _recovered_s(i) is None else "",
        is_number=True,
        keep=3,
    ),
    Column("BACK", lambda i: _short_duration(i.back_s), is_number=True, keep=2),
    Column("WHAT", lambda i: i.text, comfort=36, is_prose=True),
)


@click.command()
@click.argument("id", metavar="ID")
@client_options(job_help="Ignored, because an incident's ID identifies its job.", timeout="10s")
def incident(given: ClientOptions, id: str) -> None:
    """Show an incident: its timeline and what each rank was doing.

    Suspects come first. `lighthouse incidents` lists the IDs.
    """
    with given.connect() as client:
        found = client.incident(id, timeout_s=given.timeout)
    given.show(to_document(found), lambda width: lines_of(found, width))


def lines_of(incident: Incident, width: int) -> Iterator[Text]:
    summary = incident.summary
    title = Text.assemble((summary.id, "bold"), f"  {summary.kind.value}  job {printable(summary.job)}")
    yield from wrapped(title, width)
    yield from wrapped(Text(printable(summary.text), style="red"), width)
    yield Text()
    for after_s, what in _timeline(summary):
        first, *more = wrapped(Text(printable(what)), width - 12)
        yield Text.assemble(f"{after_s:+10.2f}s ", first)
        for line in more:
            yield Text.assemble(" " * 12, line)
    yield Text()
    behind = summary.suspects if summary.kind is IncidentKind.STALL else ()
    yield from gathered_lines(Gathered(incident.evidence, incident.missing), behind)


_FAULTS = {
    IncidentKind.STALL: "the fault: the last progress",
    IncidentKind.LOSS: "the fault: the last heartbeat",
    IncidentKind.SLOW: "the fault: the first slow comparison",
}


def _timeline(summary: IncidentSummary) -> list[tuple[float, str]]:
    """Return the events of an incident as (seconds since the fault, text) pairs, sorted by time."""
    is_of_run = summary.kind in (IncidentKind.RESTART, IncidentKind.EXIT)
    formed = "generation" if is_of_run else "quorum"
    happened = [
        (0.0, _FAULTS.get(summary.kind, "the fault")),
        (summary.noticed_s, f"noticed, at {clock(summary.opened_unix_s)}"),
        (summary.evidence_s, "evidence collected"),
        (summary.acted_s, summary.action),
        (summary.quorum_s, f"{formed} {summary.quorum_id} formed"),
        (summary.over_s, "no longer slow" if summary.kind is IncidentKind.SLOW else "progress resumed"),
        (summary.step_s, "first step committed"),
        (summary.back_s, f"back in the quorum: {', '.join(summary.suspects)}"),
    ]
    return sorted(((at, what) for at, what in happened if at is not None), key=lambda line: line[0])
